"""Names of other tools lead to our keys."""

import re

import pytest

from titan_like.config import ConfigError, JobConfig, load_config, synonyms
from titan_like.config.entry_points import names_of
from titan_like.config.section import options_of
from titan_like.models.registry import config_class


def test_other_projects_names_lead_to_keys():
    table = synonyms.table()
    sections = {name: options_of(field.annotation) for name, field in JobConfig.model_fields.items()}
    keys = {f"{section}.{key}" for section, options in sections.items() for key in options}
    fields = {field for family in names_of("model.family") for field in config_class(family).model_fields}
    keys |= {f"model.overrides.{field}" for field in fields}
    taken = [*table["names"], *table["values"], *(key for tool in synonyms.tools().values() for key in tool.keys)]
    named = {key for text in table["advice"] for key in re.findall(r"\b[a-z]\w*\.[a-z]\w*", text)}
    assert {*map(synonyms.shown_key, taken), *named} <= keys
    groups = [*table["names"].values(), *table["advice"].values()]
    names = [name for group in groups for name in synonyms.words(group)]
    assert len(names) == len({*names} - keys)
    assert all(re.fullmatch(r"[a-z0-9_.]+", name) for name in names)


# Keys of other tools, and words of their hints. Likeness would lead to the wrong key.
HINTS = """
training.seed => job.seed
validation.enable => evaluation.interval
validator.enable => evaluation.interval
training.warmup_steps => lr_scheduler.warmup_steps
training.dataset => data.dataset = "hf"
validation.seq_len => not needed: validation has the run's lengths
training.gc_freq => not needed
checkpoint.export_dtype => not needed
activation_checkpoint.selective_ac_option => activation_checkpoint.every_n_layers
model_spec.name => model.flavor
fault_tolerance.enable => no equivalent
optimizer.early_step_in_backward => no equivalent
mx.recipe_name => no equivalent: MXFP8
checkpoint.last_save_in_hf => checkpoint.hugging_face_interval
optimizer.fused => --help lists them
q_lora_rank => model.overrides.q_lora_rank
hub_strategy => no equivalent
sequence_parallel_degree => parallelism.context_parallel_degree
datasets.name => not needed
training.microbatch_size => training.micro_batch_size
optimiser.lr => optimizer.lr
checkpoint.intervall => checkpoint.interval
""".strip().splitlines()


@pytest.mark.parametrize("case", HINTS)
def test_another_tool_s_key_has_the_table_s_hint(case):
    key, _, words = case.partition(" => ")
    with pytest.raises(ConfigError) as error:
        load_config([f"--{key}=1"])
    assert words in str(error.value)
