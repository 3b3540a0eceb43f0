"""ONNX files: written through `torch.export`, quantised and run by onnxruntime.

The packages are the extra ``onnx`` and are imported when they are used.
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.settings.lookup import needs

ABOUT = "semisfl"
"""The key of the file's metadata under which the model is described."""
CALIBRATION_BATCH = 16
OPERATORS = """
Add Sub Mul Div Pow Sqrt Reciprocal Erf Clip Cast Identity Relu LeakyRelu PRelu Elu Selu Gelu Softplus Softmax
Tanh Sigmoid HardSigmoid HardSwish Conv Gemm MatMul Pad MaxPool AveragePool GlobalAveragePool GlobalMaxPool
ReduceMean ReduceMax BatchNormalization InstanceNormalization GroupNormalization LayerNormalization Shape
Range Expand Reshape Flatten Transpose Squeeze Unsqueeze Concat Split Slice Gather QuantizeLinear DequantizeLinear
"""
"""Operators of a bottom. None has a graph of its own, so none can run for ever."""
needs_onnx = partial(needs, "onnx", "onnx", "onnxruntime", "onnxscript", "onnx_ir")


def write(
    module: nn.Module, example: Tensor, names: tuple[str, str], about: dict[str, Any], path: Path
) -> None:
    """Write a module as an ONNX file for any batch size.

    Args:
        module: a module of plain torch layers, with one input and one output.
        example: an input of two rows or more.
        names: names of the input and the output in the file.
        about: metadata that the file will hold as JSON, under the key `ABOUT`.
        path: the file.
    """
    with needs_onnx():
        import onnxruntime  # noqa: F401  # the written file is run and checked afterwards
        import onnxscript  # noqa: F401
    batch = torch.export.Dim("batch", min=1)
    with _quiet():
        program = torch.onnx.export(
            module,
            (example,),
            input_names=[names[0]],
            output_names=[names[1]],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props[ABOUT] = json.dumps(about)
        program.save(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of missing packages and deprecations, and advice, in the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def quantize(path: Path, inputs: Tensor) -> None:
    """Replace a file by its int8 form.

    ``inputs``: rows of the model's input that show the range of each layer's values. A temporary file is left
    beside ``path``, for the caller to remove.
    """
    with needs_onnx():
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process
    name = File(path).input
    batches = iter([{name: part.numpy()} for part in inputs.split(CALIBRATION_BATCH)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    prepared = path.with_suffix(".prepared.onnx")
    with _quiet():
        # ONNX's own shape inference suffices for these layers. Where the symbolic one (for transformers)
        # fails, some versions stop and leave files in the working directory.
        quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(path),
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            activation_type=quantization.QuantType.QUInt8,
        )


def _check_foreign(model: Any) -> None:
    """Raise `ValueError` for an ONNX model that reads other files, or has operators other than `OPERATORS`."""
    graph = model.graph
    if graph.sparse_initializer or any(one.external_data for one in graph.initializer):
        raise ValueError("it takes weights from another file; export the model again")
    used = {node.op_type if node.domain in ("", "ai.onnx") else node.domain for node in graph.node}
    if unknown := [*sorted(used - {*OPERATORS.split()}), *(one.name for one in model.functions)]:
        raise ValueError(f"it has the operator {unknown[0]}, which no exported bottom needs")


class File:
    """An ONNX file of one input and one output, which onnxruntime runs on the CPU when it is called."""

    def __init__(self, path: Path, *, foreign: bool = False) -> None:
        """Load a file; raise `ValueError` with the reason if it cannot be used.

        ``foreign``: somebody else may have made the file. It must hold all its weights: a file could name a key
        that lies beside it as its weights, and the features would show the key. And it must consist of
        `OPERATORS` alone, none of which has loops.
        """
        with needs_onnx():
            import onnx
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        try:
            content = path.read_bytes()
            if foreign:
                _check_foreign(onnx.ModelProto.FromString(content))
            self._session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime has a class of its own for each way to fail
            raise ValueError(f"{path} cannot be used as an ONNX file: {error}") from error
        self.input = self._session.get_inputs()[0].name

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the output for a batch of inputs."""
        (outputs,) = self._session.run(None, {self.input: inputs.numpy()})
        return torch.from_numpy(outputs)

    @property
    def identity(self) -> str:
        """Return the identity of the model that `write` put into the file; empty if another program wrote it."""
        text = self._session.get_modelmeta().custom_metadata_map.get(ABOUT, "{}")
        return str(json.loads(text).get("identity", ""))
