"""One case: a verb struck in a child, what it left judged, the verb run again, and its end judged."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import inshrink_core
from benchmarks.crash.disk import Tree, read_tree, write_tree
from benchmarks.crash.judging import Expected, digests, judge_archive, noted, promised
from benchmarks.crash.shim import Operation, Plan, Shim
from benchmarks.crash.verbs import VERBS, Verb
from inshrink_core.archive import LocalStorage
from inshrink_core.errors import StorageError

LIMIT_S = 60.0
"""A case takes milliseconds; one that takes this long hangs, also on a loaded machine."""

FRAMES = "/frames/"


@dataclass(frozen=True)
class Outcome:
    """What came of a case: each problem begins with its class (`CLASSES`)."""

    problems: tuple[str, ...] = ()
    fired: int = 0
    notes: tuple[str, ...] = ()
    ended: str = ""


CLASSES = ("lost", "wrong", "untyped", "refused", "leftover")
"""A promised step is gone; something else than was written is readable; an error that is not a StorageError;
the verb does not complete when run again; files that no later writer removes."""


@dataclass
class Stage:
    """A verb with its beginning and its undisturbed end, and the folder that its cases run in."""

    verb: Verb
    shim: Shim
    root: Path
    before: Tree = field(default_factory=dict)
    expected: Expected = field(default_factory=Expected)
    log: tuple[Operation, ...] = ()
    n_operations: int = 0
    logged: Tree = field(default_factory=dict)
    judged: dict[object, dict[str, Any]] = field(default_factory=dict)

    def open(self) -> None:
        """Run the verb undisturbed: first here, so that all is compiled and imported, then logged."""
        self._fresh()
        self.verb.prepare(self.root)
        self.before = read_tree(self.root)
        self.verb.act(self.root, lambda _: None)
        self._expect()
        found = self._run_in_child(lambda: self._act(Plan()))
        if found != {"ended": "done"}:
            raise RuntimeError(f"{self.verb.name} fails undisturbed: {found}")
        # Children share the parent's memory: a collection that walked all of it would copy all of it.
        gc.collect()
        gc.freeze()
        self.log, self.n_operations = tuple(self.shim.log()), self.shim.count
        self.logged = read_tree(self.root)

    def _expect(self) -> None:
        self.expected = Expected(tree=read_tree(self.root))
        for path in {self.verb.archive, getattr(self.verb, "target", None)} - {None}:
            archive = self.root / str(path)
            self.expected.final = inshrink_core.Archive.open(archive).steps
            self.expected.steps = digests(archive)
        if self.verb.archive and self.verb.archive in self.before:
            self._fresh(self.before)
            for step, digest in digests(self.root / self.verb.archive).items():
                self.expected.steps[step] = self.expected.steps.get(step, frozenset()) | digest

    def _fresh(self, tree: Tree | None = None) -> None:
        """Make the folder anew."""
        shutil.rmtree(self.root, ignore_errors=True)
        write_tree(self.root, tree or {})

    def killed(self, plan: Plan) -> Outcome:
        """Run the verb until it is killed, and judge."""
        return self._struck(plan, "wrong")

    def failed(self, plan: Plan) -> Outcome:
        """Run the verb while the system refuses something, and judge what it left."""
        if not self.verb.again_within:
            return self._struck(plan, "refused")

        def act() -> dict[str, Any]:
            acted = self._act(plan)
            again = self._judged(self.shim.notes())
            return {**acted, "problems": acted.get("problems", []) + again["problems"]}

        found = self._run_in_child(act)
        return self._outcome(found, _problems(found, "refused"))

    def _struck(self, plan: Plan, silent: str) -> Outcome:
        """Run the verb in a child, and judge here."""
        found = self._run_in_child(lambda: self._act(plan))
        problems = _problems(found, silent)
        return self._outcome(found, problems + _problems(self._judge_once(self.shim.notes()), "refused"))

    def _run_in_child(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run something in a child, on what the verb begins with and with an empty log."""
        self._fresh(self.before)
        self.shim.clear()
        return in_child(work)

    def _outcome(self, found: dict[str, Any], problems: tuple[str, ...]) -> Outcome:
        return Outcome(problems, self.shim.fired, self.shim.notes(), found.get("ended", ""))

    def killed_and_continued(self, plan: Plan) -> tuple[list[Operation], list[Operation]]:
        """Kill the verb, run it again undisturbed, and return the operations of both."""
        self._run_in_child(lambda: self._act(plan))
        first = list(self.shim.log())
        self.shim.clear()
        in_child(lambda: self._act(Plan(), again=True))
        return first, list(self.shim.log())

    def without_power(self, tree: Tree, notes: tuple[str, ...]) -> Outcome:
        """Judge what a power loss left."""
        self._fresh(tree)
        return Outcome(_problems(self._judge_once(notes), "refused"), 0, notes)

    def _judge_once(self, notes: tuple[str, ...]) -> dict[str, Any]:
        """Judge what is there in a child; a state that was judged before has the same judgement."""
        key = (frozenset(read_tree(self.root).items()), notes)
        if key not in self.judged:
            self.judged[key] = in_child(lambda: self._judged(notes))
        return self.judged[key]

    def _act(self, plan: Plan, *, again: bool = False) -> dict[str, Any]:
        """Run the verb, struck as planned; an error must be one of ours."""
        problems = _uncaught()
        self.shim.arm(self.root, plan)
        try:
            # What makes no archive is run again in another way, over what is there.
            finished = True
            if again and not self.verb.archive:
                finished = self.verb.again(self.root)
            else:
                self.verb.act(self.root, self.shim.note)
            if finished:
                self.shim.note("done")
            ended = "done"
        except StorageError as error:
            ended = f"{type(error).__name__}: {error}"
            if not error.where or not error.remedy:
                problems.append(f"untyped: a StorageError without where or remedy: {error}")
        except Exception as error:  # whatever it is, it is reported
            ended = f"{type(error).__name__}: {error}"
            problems.append(f"untyped: {_last_lines(error)}")
        finally:
            self.shim.disarm()
        gc.collect()
        if self.verb.archive and LocalStorage(self.root / self.verb.archive).is_locked():
            problems.append("refused: the lock is still held after the error")
        return {"ended": ended} | ({"problems": problems} if problems else {})

    def _judged(self, notes: tuple[str, ...]) -> dict[str, Any]:
        """Judge what is there, run the verb again, and judge the end."""
        problems = list(self._as_left(notes))
        if not problems:
            try:
                problems += self._recovered(notes)
                self.verb.again(self.root)
            except Exception as error:  # a second run may not fail with any error
                problems.append(f"refused: {_last_lines(error)}")
            else:
                problems += self._as_ended()
        return {"problems": problems}

    def _as_left(self, notes: tuple[str, ...]) -> Iterator[str]:
        if self.verb.archive:
            must = promised(self.verb.archive, self.verb.required, notes, self.expected)
            yield from judge_archive(self.root / self.verb.archive, self.expected, must)
        yield from self.verb.outputs(self.root, self.expected, notes)
        yield from self._changed_originals()

    def _recovered(self, notes: tuple[str, ...]) -> Iterator[str]:
        """What a saver had saved is archived when the next one is opened."""
        saved = noted(notes, "saved")
        if saved and self.verb.archive:
            VERBS["saver"].recover(self.verb, self.root)  # type: ignore[attr-defined]
            yield from judge_archive(self.root / self.verb.archive, self.expected, tuple(saved))

    def _as_ended(self) -> Iterator[str]:
        if self.verb.archive:
            archive = self.root / self.verb.archive
            expected = self.expected
            if not self.verb.exact_again:
                expected = Expected(digests(archive), expected.final, expected.tree)
            yield from judge_archive(archive, expected, expected.final, deep=False)
            if inshrink_core.Archive.open(archive).steps != expected.final:
                yield "refused: the second run did not end as the undisturbed one"
            yield from (f"leftover: {note}" for note in inshrink_core.verify(archive).notes)
        yield from self.verb.outputs(self.root, self.expected, ("done",))
        yield from self._changed_originals()
        now = {path for path in read_tree(self.root) if FRAMES not in path or "/." in path}
        yield from (f"leftover: {path}" for path in sorted(now - set(self.expected.tree)))

    def _changed_originals(self) -> Iterator[str]:
        now = read_tree(self.root)
        for path, content in self.before.items():
            inside = any(path == top or path.startswith(f"{top}/") for top in self.verb.originals)
            if inside and not path.endswith("/lock") and now.get(path, b"gone") != content:
                yield f"wrong: {path} was changed"


def _uncaught() -> list[str]:
    """Return a list that gets what threads and freed objects raise, for the rest of this process."""
    found: list[str] = []
    threading.excepthook = lambda args: found.append(f"untyped: in a thread: {args.exc_value!r}")
    sys.unraisablehook = lambda args: found.append(f"untyped: unraisable: {args.exc_value!r}")
    return found


def _last_lines(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "inshrink_core" in f.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {error} ({place})"


def _problems(found: dict[str, Any], silent: str) -> tuple[str, ...]:
    """Return the problems a child told; one that ended without a word was killed, or hung."""
    if "hung" in found:
        return (f"{silent}: hangs",)
    if "died" in found and silent == "refused":
        return (f"refused: the process ended with {found['died']}",)
    return tuple(found.get("problems", ()))


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run something in a forked child and return what it returns (`Child.answer`)."""
    return Child.start(work).answer()


class Child(NamedTuple):
    """A forked process, and the end of the pipe that brings its answer."""

    pid: int
    answers: Connection

    @classmethod
    def start(cls, work: Callable[[], dict[str, Any]]) -> Child:
        """Fork a process that does the work."""
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, ours)
        code = 1
        try:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            theirs.send(work())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def answer(self) -> dict[str, Any]:
        """Return what the work returned; ``died`` where it told nothing, ``hung`` where it took too long."""
        found: dict[str, Any] = {}
        if not self.answers.poll(LIMIT_S):
            os.kill(self.pid, signal.SIGKILL)
            found = {"hung": True}
        else:
            with contextlib.suppress(EOFError, OSError):
                found = self.answers.recv()
        self.answers.close()
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return found or {"died": f"signal {-code}" if code < 0 else f"code {code}"}
