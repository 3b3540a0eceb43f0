"""ONNX: written through `torch.export`, quantised and run by onnxruntime. An extra, imported when used."""

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

from semisfl.files import open_file, parse_json
from semisfl.settings.extras import needs
from semisfl.use.memory_limit import MemoryLimit

ABOUT = "semisfl"
"""The key of the file's metadata under which the model is described."""
CALIBRATION_BATCH = 16
needs_onnx = partial(needs, "onnx", "onnx", "onnxruntime", "onnxscript", "onnx_ir")


def write(
    module: nn.Module, example: Tensor, names: tuple[str, str], about: dict[str, Any], path: Path
) -> None:
    """Write ``module`` for any batch size; ``names`` are those of its input and output."""
    with needs_onnx():
        import onnxruntime  # noqa: F401  # the written file is run and checked afterwards
        import onnxscript  # noqa: F401
    batch = torch.export.Dim("batch", min=1)
    with _quiet("torch.onnx"):
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
def _quiet(logger: str | None) -> Iterator[None]:
    """Silence warnings of missing packages and deprecations, and advice; None: the root logger."""
    chatty = logging.getLogger(logger)
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatty.setLevel(level)


def quantize(path: Path, inputs: Tensor) -> None:
    """Replace a file by its int8 form; ``inputs`` calibrate the range of each layer's values.

    A file of its own stays beside it, for the caller to remove.
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
    with _quiet(None):
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


def _messages(message: Any) -> Iterator[Any]:
    """Yield an ONNX message and every message in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)


def _reads_others(model: Any) -> bool:
    """Return whether any tensor of an ONNX model lies in another file."""
    tensors = (one for one in _messages(model) if one.DESCRIPTOR.name == "TensorProto")
    return any(one.external_data or one.data_location == one.EXTERNAL for one in tensors)


def _repeats(model: Any) -> bool:
    """Return whether a node has a graph of its own, as a loop does, or a function is called, perhaps by another."""
    graphs = sum(one.DESCRIPTOR.name == "GraphProto" for one in _messages(model))
    return graphs > 1 or len(model.functions) > 0


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class File:
    """An ONNX file of one input and one output, run on the CPU.

    It must contain all its weights: a stranger's file could name a key that lies beside it as its weights, and
    the features would show the key. It must have no loops, which could run for ever. ``memory``: bytes that it may
    take; a small file can ask for any amount.
    """

    def __init__(self, path: Path, memory: int | None = None) -> None:
        with needs_onnx():
            import onnx
            import onnxruntime
        self._path, self._limit = path, MemoryLimit(memory)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.load_model_format", "ONNX")
        try:
            with open_file(path) as file:
                content = file.read()
            model = onnx.ModelProto.FromString(content)
            if _reads_others(model):
                raise ValueError(
                    "it takes weights from another file, which could be any of yours; export the model again"
                )
            if _repeats(model):
                raise ValueError(
                    "it has loops, branches or functions, which could run for ever; export the model again"
                )
            with self._limit.enforced():
                self._session = onnxruntime.InferenceSession(
                    content, options, providers=["CPUExecutionProvider"]
                )
        except Exception as error:  # onnxruntime has a class of its own for each way to fail
            raise ValueError(f"{path} cannot be used as an ONNX file: {_line(error)}") from error
        takes, gives = self._session.get_inputs(), self._session.get_outputs()
        if len(takes) != 1 or [entry.type for entry in gives] != ["tensor(float)"]:
            raise ValueError(
                f"{path} is no part of a model, which takes one tensor and gives one of float32; export it again"
            )
        self.input = takes[0].name

    def __call__(self, inputs: Tensor) -> Tensor:
        try:
            with self._limit.enforced():
                (outputs,) = self._session.run(None, {self.input: inputs.numpy()})
        except Exception as error:
            raise ValueError(f"{self._path} cannot be run: {_line(error)}") from error
        return torch.from_numpy(outputs)

    def about(self) -> dict[str, Any]:
        """Return the description that `write` put into the file."""
        text = self._session.get_modelmeta().custom_metadata_map.get(ABOUT, "{}")
        with contextlib.suppress(ValueError):
            values = parse_json(text)
            if isinstance(values, dict) and values.keys() >= {"identity", "part"}:
                return values
        raise ValueError(
            f"{self._path} was not written by semisfl export; export the bottom of the run again"
        )
