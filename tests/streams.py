"""Streams of CUDA where there is none: each notes what is asked of it."""

from typing import ClassVar


class FakeStream:
    """A stream that notes what it was told."""

    made: ClassVar[list["FakeStream"]] = []

    def __init__(self, device):
        self.calls = []
        self.made.append(self)

    def wait_stream(self, other):
        self.calls.append(f"wait for {other}")

    def synchronize(self):
        self.calls.append("synchronize")

    def __enter__(self):
        self.calls.append("work")

    def __exit__(self, *_):
        return None
