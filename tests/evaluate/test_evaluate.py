import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inshrink_core.errors import EvaluatorError, InputError, UntrustedCodeError
from inshrink_core.evaluate import Evaluator, EvaluatorRequest, compared_steps
from inshrink_core.formats.logs.log import RunSettings
from inshrink_core.metrics import Direction
from inshrink_core.samples import sample
from tests.builders import memory_run
from tests.processes import until
from tests.signals import hear_ctrl_c

STATE = {"w": torch.tensor([[3.0, 4.0]])}


def source_of(body):
    """Return an evaluator's source from the body of its function."""
    return "import torch\n\ndef evaluate(state):\n" + textwrap.indent(textwrap.dedent(body), "    ")


@pytest.fixture(scope="module")
def shared_child(tmp_path_factory):
    """Return an evaluator that runs whatever source lies beside it: one start of torch for many tests."""
    path = tmp_path_factory.mktemp("shared") / "evaluator.py"
    path.write_text(
        "from pathlib import Path\n"
        "def run_source(state):\n"
        "    names = {'__name__': __name__}\n"
        "    exec(compile(Path(__file__).with_name('source.txt').read_text(), __file__, 'exec'), names)\n"
        "    return names['evaluate'](state)\n"
    )
    with Evaluator(f"{path}:run_source") as shared:
        yield shared


@pytest.fixture
def evaluator(shared_child):
    """Return a function that makes an evaluator from a function's body, in the child that tests share."""

    def make(body, metric=None, direction=None):
        Path(shared_child.spec.rpartition(":")[0]).with_name("source.txt").write_text(source_of(body))
        shared_child.metric, shared_child.direction = metric, Direction(direction) if direction else None
        return shared_child

    return make


def is_alive(pid):
    """Tell whether a process runs; one that has ended and was not yet collected does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return "\nState:\tZ" not in status.read_text() if status.exists() else True


def test_an_evaluator_returns_its_scalars_and_the_chosen_metric(evaluator):
    found = evaluator(
        """
        return {"loss": state["w"].sum(), "n": 2, "exact": True,
                "standard_errors": {"loss": 0.5}, "predictions": state["w"]}
        """
    ).evaluate(STATE)
    assert (found.metric, found.direction, found.value) == ("loss", "lower", 7.0)
    assert found.metrics == {"loss": 7.0, "n": 2.0, "exact": 1.0}
    assert found.standard_errors == {"loss": 0.5}
    assert np.array_equal(found.predictions, [[3.0, 4.0]])
    assert found.log_probs is None
    assert found.seconds > 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1.5, -2.0], dtype=torch.float16),
        torch.tensor([1.5, -2.0]).to(torch.float8_e5m2),
        torch.tensor([2**62, -1]),
        torch.tensor([True, False]),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([float("nan"), -0.0]),
    ],
    ids=["bf16", "fp16", "fp8", "int64", "bool", "0-d", "empty", "non-contiguous", "nan"],
)
def test_tensors_arrive_bit_for_bit_in_their_dtype_and_shape(evaluator, tensor):
    judge = evaluator(
        """
        x = state["x"]
        data = x.contiguous().reshape(-1).view(torch.uint8).tolist()
        print(x.dtype, tuple(x.shape), data)
        raise ValueError("show")
        """
    )
    data = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    with pytest.raises(EvaluatorError) as caught:
        judge.evaluate({"x": tensor})
    assert f"{tensor.dtype} {tuple(tensor.shape)} {data}" in str(caught.value)


def test_tied_tensors_arrive_tied_and_may_be_changed(evaluator):
    judge = evaluator(
        "state['a'].add_(1)\nstate.clear() if state['b'][0] != 2 else None\nreturn {'loss': 1.0}"
    )
    tied = torch.ones(3)
    judge.evaluate({"a": tied, "b": tied})
    assert judge.evaluate({"a": tied, "b": tied}).value == 1.0
    assert tied.tolist() == [1.0, 1.0, 1.0]


def test_prints_never_reach_our_output_and_are_shown_with_an_error(evaluator, capfd):
    judge = evaluator(
        """
        import os, sys
        print("from print"); os.write(1, b"from fd\\n"); print("to stderr", file=sys.stderr)
        if state["w"].sum() == 0:
            raise RuntimeError("broken")
        return {"loss": 1.0}
        """
    )
    assert judge.evaluate(STATE).value == 1.0
    with pytest.raises(
        EvaluatorError, match=r"(?s)RuntimeError: broken.*from print.*from fd|from fd.*from print"
    ):
        judge.evaluate({"w": torch.zeros(1)})
    assert capfd.readouterr() == ("", "")


def test_what_is_printed_without_end_takes_little_of_the_disk_and_its_end_is_told(evaluator, monkeypatch):
    from inshrink_core.evaluate import evaluator as module

    monkeypatch.setattr(module, "_MAX_OUTPUT_BYTES", 100_000)
    judge = evaluator(
        """
        import time
        for turn in range(20):
            print("x" * 50_000 * int(state["w"].sum() == 0), "turn", turn, flush=True)
            time.sleep(0.02)
        if state["w"].sum() == 0:
            raise RuntimeError("broken")
        return {"loss": 1.0}
        """
    )
    judge.evaluate(STATE)
    with pytest.raises(EvaluatorError, match=r"RuntimeError: broken.*turn 19"):
        judge.evaluate({"w": torch.zeros(1)})
    assert judge._child._output_path.stat().st_size < 20 * 50_000
    assert judge.evaluate(STATE).value == 1.0


def test_an_exception_is_told_with_its_last_line_and_place_and_the_child_lives_on(evaluator):
    judge = evaluator("if state['w'].sum() == 0:\n    raise ValueError('no\\nluck')\nreturn {'loss': 1}")
    assert judge.evaluate(STATE).value == 1.0
    with pytest.raises(EvaluatorError, match=r"ValueError: no luck \(line 5\)"):
        judge.evaluate({"w": torch.zeros(1)})
    assert judge.evaluate(STATE).value == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 0.5", "it returned float, not a dict"),
        ("return None", "it returned NoneType, not a dict"),
        ("return {}", "not clear which scalar .*none"),
        ("return {'a': 1.0, 'b': 2.0}", "not clear which scalar .*a, b.*--eval-metric"),
        ("return {'loss': float('nan')}", "its 'loss' is nan"),
        ("return {'loss': float('inf')}", "its 'loss' is inf"),
        ("return {'loss': [1.0, 2.0]}", "its 'loss' is list, not a number"),
        ("return {'loss': torch.ones(2)}", "its 'loss' is Tensor, not a number"),
        ("return {'loss': 1, 'log_probs': torch.zeros(3)}", r"'log_probs' has the shape \(3,\)"),
        ("return {'loss': 1, 'log_probs': torch.zeros(2, 3, 4)}", r"flatten\(0, -2\)"),
        ("return {'loss': 1, 'log_probs': torch.zeros(0, 3)}", "'log_probs' has the shape"),
        ("return {'loss': 1, 'log_probs': 'text'}", "'log_probs' is not an array of numbers"),
        ("return {'loss': state['conv9.weight'].sum()}", "the tensor 'conv9.weight', which the checkpoint"),
        ("return {'loss': {}['key']}", "the tensor 'key'|KeyError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "ended with exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal SIGSEGV"),
        ("input()\nreturn {'loss': 1}", "EOFError"),
        ("torch.nn.Linear(2, 1).load_state_dict(state)", r"Missing key\(s\) in state_dict: .*weight"),
    ],
)
def test_an_unusable_outcome_is_one_clear_error(evaluator, body, message):
    with pytest.raises(EvaluatorError, match=message) as caught:
        evaluator(body).evaluate(STATE)
    assert "Traceback" not in str(caught.value)
    assert str(caught.value).startswith(str(Path(caught.value.where)))


def test_a_hang_is_ended_after_the_timeout_and_the_next_evaluation_has_a_new_child(evaluator, tmp_path):
    judge = evaluator(
        f"""
        import os, time
        if state["w"].sum() == 0:
            with open({str(tmp_path / "pid")!r}, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(60)
        return {{"loss": 1.0}}
        """
    )
    judge.evaluate(STATE)  # the import of torch in the child is not what is timed here
    judge.timeout = 1.0
    start = time.monotonic()
    with pytest.raises(EvaluatorError, match="did not answer within 1 s"):
        judge.evaluate({"w": torch.zeros(1)})
    assert time.monotonic() - start < 10
    assert not is_alive(int((tmp_path / "pid").read_text()))
    judge.timeout = 60.0
    assert judge.evaluate(STATE).value == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def evaluate(state:\n", "SyntaxError"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("def score(state):\n    return {}\n", r"no function 'evaluate'.*score"),
    ],
)
def test_a_file_without_a_function_to_import_is_an_error_of_the_evaluator(tmp_path, source, message):
    path = tmp_path / "evaluator.py"
    path.write_text(source)
    with Evaluator(f"{path}:evaluate") as judge, pytest.raises(EvaluatorError, match=message):
        judge.evaluate(STATE)


@pytest.mark.parametrize(
    "spec", ["evaluator.py", ":evaluate", "evaluator.py:", "evaluator.py:not a name", ""]
)
def test_a_spec_that_is_not_file_and_function_is_refused(spec):
    with pytest.raises(EvaluatorError, match=r"FILE\.py:FUNCTION"):
        Evaluator(spec)


def test_a_missing_file_a_bad_direction_and_a_bad_timeout_are_refused(tmp_path):
    with pytest.raises(EvaluatorError, match="no such evaluator file"):
        Evaluator(f"{tmp_path}/none.py:evaluate")
    spec = f"{sample()}/evaluator.py:evaluate"
    with pytest.raises(InputError, match="'higher' or 'lower'"):
        Evaluator(spec, direction="up")
    with pytest.raises(InputError, match="positive"):
        Evaluator(spec, timeout=0)


def test_the_metric_is_the_one_asked_for_else_loss_else_the_only_one(evaluator):
    assert evaluator("return {'f1': 0.5, 'loss': 2}", metric="f1").evaluate(STATE).metric == "f1"
    assert evaluator("return {'f1': 0.5, 'loss': 2}").evaluate(STATE).metric == "loss"
    assert evaluator("return {'val_accuracy': 0.5}").evaluate(STATE).direction == "higher"
    with pytest.raises(EvaluatorError, match=r"no 'bleu' .*f1, loss"):
        evaluator("return {'f1': 0.5, 'loss': 2}", metric="bleu").evaluate(STATE)


def test_an_unknown_direction_is_an_error_that_says_how_to_give_it(evaluator):
    with pytest.raises(InputError, match=r"--direction.*inshrink\.toml"):
        evaluator("return {'score': 1}").evaluate(STATE)
    assert evaluator("return {'score': 1}", direction="higher").evaluate(STATE).direction == "higher"


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_ends_the_child_too(tmp_path):
    (tmp_path / "evaluator.py").write_text(
        "import os, time\n"
        "def evaluate(state):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(120)\n"
    )
    script = (
        "import torch\nfrom inshrink_core.evaluate import Evaluator\n"
        f"Evaluator({str(tmp_path / 'evaluator.py') + ':evaluate'!r}).evaluate({{'w': torch.ones(1)}})"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hear_ctrl_c
    )
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        parent.send_signal(2)
        _, errors = parent.communicate(timeout=20)
    finally:
        parent.kill()
        parent.wait()
    assert b"KeyboardInterrupt" in errors
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "evaluator.py").write_text(source_of("return {'loss': 1}"))
    temporary, threads = tmp_path / "temporary", threading.active_count()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with Evaluator(f"{tmp_path}/evaluator.py:evaluate") as judge:
        judge.evaluate(STATE)
        assert len(list(temporary.iterdir())) == 1
    assert list(temporary.iterdir()) == []
    assert threading.active_count() == threads


def test_an_evaluator_that_nobody_closed_takes_its_child_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "evaluator.py").write_text(source_of("import os\nreturn {'loss': os.getpid()}"))
    pid = int(Evaluator(f"{tmp_path}/evaluator.py:evaluate").evaluate(STATE).value)
    assert not is_alive(pid)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluator.py"]


def resolve_evaluator(settings, directory, **asked):
    run = SimpleNamespace(settings=settings, directory=directory, is_elsewhere=False)
    return EvaluatorRequest(**asked).resolve(run if settings else None)


@pytest.fixture
def own_run(tmp_path):
    """A run directory whose evaluator leaves a mark when it is imported."""
    mark = tmp_path / "executed"
    (tmp_path / "evaluator.py").write_text(
        f"open({str(mark)!r}, 'w').close()\ndef evaluate(state): return {{'loss': 1.0}}\n"
    )
    return tmp_path, mark


def test_a_runs_own_code_is_refused_until_the_user_trusts_it(own_run):
    directory, mark = own_run
    with pytest.raises(UntrustedCodeError, match="--trust-run"):
        resolve_evaluator(RunSettings(file="evaluator.py"), directory)
    assert not mark.exists()
    with resolve_evaluator(RunSettings(file="evaluator.py"), directory, trust_run=True) as judge:
        assert judge.evaluate(STATE).value == 1.0
    assert mark.exists()


def test_no_evaluator_at_all_says_how_to_give_one(tmp_path):
    for settings, directory in ((None, None), (RunSettings(), tmp_path)):
        with pytest.raises(InputError, match=r"--evaluator FILE\.py:FUNCTION"):
            resolve_evaluator(settings, directory, trust_run=True)


def test_a_run_cannot_name_an_evaluator_outside_of_itself(own_run):
    directory, _ = own_run
    (directory / "run").mkdir()
    for name in ("../evaluator.py", str(directory / "evaluator.py")):
        with pytest.raises(InputError, match="outside of the run"):
            resolve_evaluator(RunSettings(file=name), directory / "run", trust_run=True)


def test_the_runs_direction_is_not_applied_to_another_metric(own_run):
    directory, _ = own_run
    settings = RunSettings(file="evaluator.py", metric="score", direction="higher")
    assert resolve_evaluator(settings, directory, trust_run=True).direction == "higher"
    other = resolve_evaluator(settings, directory, trust_run=True, metric="loss")
    assert (other.metric, other.direction) == ("loss", None)


def test_predictions_that_cannot_be_compared_name_the_step(evaluator):
    judge = evaluator("return {'loss': 1, 'log_probs': torch.log_softmax(torch.ones(len(state['w']), 2), 1)}")
    original, restored = memory_run({7: {"w": torch.ones(2)}}), memory_run({7: {"w": torch.ones(3)}})
    first, second = (lambda step, run=run: judge.evaluate(run[step]) for run in (original, restored))
    with pytest.raises(EvaluatorError, match="step 7 cannot be compared"):
        list(compared_steps(first, second, {7: None}, judge.spec))
