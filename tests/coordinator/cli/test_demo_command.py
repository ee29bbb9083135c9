"""The flags of the demo: what is wrong with them is said before anything starts."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from rankgate.coordinator.cli.demo import run
from rankgate.coordinator.cli.demo.command import demo
from rankgate.coordinator.cli.demo.job import Folder, Job, Journal
from rankgate.coordinator.cli.demo.progress import Show
from rankgate.coordinator.cli.demo.watch import Watch


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "nothing"], "neither shipped nor a path"),
        (["--model", "deepseek-v3"], "not in this demo yet"),
        (["--dtype", "float7"], "'float7' is not known"),
        (["--decode-tp", "6"], "--decode-tp: 8 KV heads cannot be split"),
        (["--break", "rank-missing", "--decode-tp", "1"], "at least 2; got 1"),
        (["--break", "nothing"], "'nothing' is not one of"),
        (["--requests", "0"], "0 is not in the range"),
    ],
)
def test_wrong_flags_are_usage_errors(flags: list[str], words: str) -> None:
    """Exit code 2 with the flag, its value and what is expected, and nothing on stdout."""
    done = CliRunner().invoke(demo, flags)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert words in " ".join(done.stderr.split())


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would have been run."""
    taken: list[Job] = []

    def take(job: Job, **_: object) -> None:
        taken.append(job)
        raise run.DemoError("stopped before it began")

    monkeypatch.setattr(run, "run_demo", take)
    return taken


def test_flags_scale_the_model_down(jobs: list[Job]) -> None:
    """Layers, heads and dtype come from the model unless a flag says otherwise."""
    flags = ["--model", "qwen3-next-80b-a3b", "--layers", "2", "--kv-heads", "4"]
    done = CliRunner().invoke(demo, [*flags, "--dtype", "float16", "--seed", "7"])
    assert done.exit_code == 1
    assert "stopped before it began" in done.stderr
    (job,) = jobs
    assert job.model.layers == (3, 7)
    assert (job.model.kv_heads, job.model.head_dim, job.model.dtype) == (4, 256, "float16")
    assert job.seed == 7


def test_the_default_is_two_to_four_of_llama(jobs: list[Job]) -> None:
    """Without flags: prefill tp 2, decode tp 4, llama-3.1-8b with fewer layers."""
    CliRunner().invoke(demo, [])
    (job,) = jobs
    assert (job.prefill_tp, job.decode_tp, job.model.name) == (2, 4, "llama-3.1-8b")
    assert (job.model.kv_heads, job.model.head_dim, job.fault) == (8, 128, "")


def test_progress_without_a_terminal_is_a_few_lines(
    jobs: list[Job], tmp_path: Path, views: SimpleNamespace
) -> None:
    """Each state of worlds and pair is said once, requests by quarters."""
    CliRunner().invoke(demo, ["--requests", "8", "--decode-tp", "2"])
    (job,) = jobs
    folder = Folder(tmp_path)
    folder.prepare(job)
    watch = Watch(folder, job)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    status = views.status([views.world("prefill"), views.world("decode")], [views.pair()])
    with Show(console) as show:
        for index in range(8):
            for rank in range(2):
                journal = Journal(folder.journal("decode", rank))
                journal.write("delivered", request=job.request(index), bytes=1000)
                journal.close()
            watch.read()
            show.update(job, watch, status)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    lines = text.splitlines()
    assert lines[0] == "world prefill: sealed 4/4 ranks, epoch 7, receive_count 4"
    assert lines[2] == "pair prefill → decode: ready, 6/6 ranks linked"
    assert [line.split(" ")[1] for line in lines[3:]] == ["2/8", "4/8", "6/8", "8/8"]
