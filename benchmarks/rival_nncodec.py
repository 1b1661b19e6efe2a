"""NNCodec as a chain of checkpoints: each alone, or residuals against the decoded one before.

NNCodec 2.1 is the reference coder of ISO/IEC 15938-17 (Neural Network Coding, second edition): uniform
quantization with a step of about 2^(QP/4), dependent (trellis-coded) quantization, and DeepCABAC. Its
settings are its own defaults but for what is said here.

Residuals run in a closed loop: a frame codes the original minus what was decoded of the frame before,
and the first frame stands alone. With temporal contexts (its tool TCA) the quantized residuals of the
frame before choose the contexts. Tensors of at most one dimension have a QP of their own, by default
-75, 18 bits below the point; -44 is the step of 2^-11 that the lattice codec gives them.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MODES = ("alone", "residual", "residual, temporal contexts")
DEFAULT_VECTOR_QP, LATTICE_VECTOR_QP = -75, -44

_UNUSED = ("tensorflow_model", "pytorch_model", "use_case_init")
"""Parts of the package that load models and data sets; they need torchvision, h5py and more."""


def load() -> Any:
    """Return the module that compresses tensors.

    Raises
    ------
    ImportError
        NNCodec is not installed.
    """
    framework = types.ModuleType("nncodec.framework")
    for name in _UNUSED:
        empty = types.ModuleType(f"nncodec.framework.{name}")
        setattr(framework, name, empty)
        sys.modules.setdefault(empty.__name__, empty)
    sys.modules.setdefault("nncodec.framework", framework)
    from nncodec import nnc

    return nnc


class Chain:
    """One chain of NNCodec bitstreams.

    Parameters
    ----------
    mode
        One of `MODES`.
    qp, vector_qp
        Quantization parameters of matrices, and of tensors of at most one dimension.
    """

    def __init__(self, mode: str, qp: int, vector_qp: int) -> None:
        self.nnc, self.mode, self.qp, self.vector_qp = load(), mode, qp, vector_qp
        self._decoded: dict[str, NDArray[np.float32]] = {}
        self._contexts: tuple[dict[str, Any], dict[str, Any]] = (_no_context(), _no_context())

    def encode(self, state: Mapping[str, Tensor]) -> tuple[bytearray, int]:
        """Return a frame and the raw bytes of what it leaves out (integer buffers, stored as they are)."""
        values = {name: _floats(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
        left_out = sum(t.numel() * t.element_size() for n, t in state.items() if n not in values)
        if self.mode != "alone" and self._decoded:
            values = {name: value - self._decoded[name] for name, value in values.items()}
        with tempfile.TemporaryDirectory() as scratch:
            bitstream = self.nnc.compress(
                values,
                bitstream_path=str(Path(scratch) / "frame.nnc"),
                qp=self.qp,
                nonweight_qp=self.vector_qp,
                use_dq=True,
                row_skipping=True,
                return_bitstream=True,
                **self._temporal(self._contexts[0]),
            )
        return bitstream, left_out

    def decode(self, bitstream: bytearray, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the decoded state; it is what the next frame is coded against."""
        context = {
            k: v for k, v in self._temporal(self._contexts[1]).items() if k.endswith(("base", "param"))
        }
        decoded = self.nnc.decompress(copy.copy(bitstream), **context)
        if self.mode != "alone" and self._decoded:
            # A tensor of zeros is left out of a difference.
            zero = np.float32(0)
            decoded = {name: value + decoded.get(name, zero) for name, value in self._decoded.items()}
        self._decoded = decoded
        return {
            name: torch.from_numpy(decoded[name]).reshape(tensor.shape).to(tensor.dtype)
            if name in decoded
            else tensor
            for name, tensor in state.items()
        }

    def _temporal(self, context: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that switch temporal contexts on."""
        if self.mode != MODES[2]:
            return {}
        differs = {"tca": bool(self._decoded), "compress_differences": bool(self._decoded)}
        return {**differs, "approx_param_base": context, "update_base_param": True}


def _no_context() -> dict[str, Any]:
    """Return the empty table of earlier symbols that NNCodec fills."""
    return {"parameters": {}, "put_node_depth": {}, "device_id": 0, "parameter_id": {}}


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = np.ascontiguousarray(tensor.float().numpy())
    return values
