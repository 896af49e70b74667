"""The measured search: layouts of a run, each trained for some steps in processes of its own."""
