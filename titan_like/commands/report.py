"""One page about a run: python scripts/report.py outputs/run

Writes report.html in the run's folder, or to --out: curves, throughput, memory, the last timeline, the planner's
prediction next to the measured step, settings, and what was wrong with the run. It needs no server and no network.
"""

from functools import partial
from pathlib import Path

from titan_like.config.errors import printable, require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, check_output_file, path_option, write_json, write_output_file
from titan_like.metrics.run_files import METRICS_FILE, read_forecast, read_records, read_settings


def main(argv: list[str]) -> int:
    """Write the page, and print the diagnosis."""
    parser = OptionParser(description=__doc__)
    parser.add_argument("run", type=path_option, help="dump folder of the run")
    parser.add_path("--out", "the page (default: report.html in the run's folder)", "FILE.html")
    parser.add_path("--json", "file to write the diagnosis to")
    options = parser.parse_args(argv)
    folder = Path(options.run)
    out = Path(options.out or folder / "report.html")
    require(out.suffix == ".html", "--out", str(out), "name an .html file")
    records = read_records(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else []
    has_loss = any(record.get("loss") is not None for record in records)
    require(has_loss, "run", str(folder), f"has no {METRICS_FILE} with a loss; train the run first")
    check_output_file("--out", str(out))

    from titan_like.metrics.report_page import page
    from titan_like.metrics.step_timeline import read_trace
    from titan_like.train.diagnosis import diagnose

    settings = read_settings(folder)
    findings = diagnose(records, settings)
    traces = {
        int(path.stem[5:]): path for path in (folder / "timeline").glob("step-*.json") if path.stem[5:].isdecimal()
    }
    step = (f"step {max(traces)}", read_trace(traces[max(traces)])) if traces else None
    texts = [finding.text for finding in findings]
    write_output_file(out, page(folder.resolve().name, records, settings, texts, read_forecast(folder), step))
    for text in texts:
        print(text)
    print(f"wrote {printable(str(out))}")
    write_json(options.json, {"diagnosis": [finding._asdict() for finding in findings]})
    return 0


run = partial(run_command, main)
