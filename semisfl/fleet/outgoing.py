"""The one place where anything leaves a client, simulated or real.

In a simulation it makes of features and bottoms what the other side would hold: clipped, with noise,
as the codec leaves them. On a device it also makes every frame that is sent, the first hello
included, and refuses those that the device's policy forbids: features and bottoms must have passed
through here, and the caps must not be used up.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.engine.hardware import Hardware
from semisfl.engine.weights import State
from semisfl.fleet.codec import codec_named, roundtrip_state
from semisfl.fleet.consent import objections
from semisfl.settings.config import Config
from semisfl.settings.policy import Policy, PolicyBreach, stricter

Parts = list[bytes | memoryview]
Encode = Callable[[str, Mapping[str, Any], Mapping[str, Tensor], Mapping[str, str] | str], Parts]


class Outgoing:
    """``encode`` makes frames, where there is a network; ``unpredictable``: draws that protect
    images come from the operating system, not from the run's seed, which the server knows."""

    def __init__(
        self,
        policy: Policy | None = None,
        encode: Encode | None = None,
        *,
        unpredictable: bool = False,
    ) -> None:
        self.own = policy or Policy()
        """What this client demands by itself."""
        self.policy = self.own
        """In force: its own and the run's, the stricter of both."""
        self._encode = encode
        self._unpredictable = unpredictable
        self._generators: list[torch.Generator] = []
        self._passed: dict[str, int] = {}

    @property
    def sends(self) -> bool:
        """Whether this is a device, on a network."""
        return self._encode is not None

    def agree(self, config: Config) -> None:
        """Take ``config`` as what is to be done; raises `PolicyBreach` for terms that cannot be."""
        self.policy = stricter(self.own, config.policy)
        found = [*objections(self.own, config), *objections(config.policy, config)]
        if found:
            raise PolicyBreach("; ".join(dict.fromkeys(found)))
        self._config = config

    def draw_from(self, config: Config, generators: Sequence[torch.Generator]) -> None:
        """Without a round: for whoever measures what `guarded` leaves of features."""
        self._config, self._generators = config, list(generators)

    # --- what a split round sends ----------------------------------------------------------------

    def start_round(self, index: int, clients: Sequence[int], hardware: Hardware) -> None:
        if not self.policy.noise and not self.policy.update_noise:
            return
        while len(self._generators) < len(clients):
            self._generators.append(hardware.graphs.generator(0))
        for generator, client in zip(self._generators, clients, strict=False):
            own = seeds.derive(self._config.seed, "policy", index, client)
            generator.manual_seed(secrets.randbits(63) if self._unpredictable else own)

    def features(self, student: Tensor, teacher: Tensor, clients: int) -> tuple[Tensor, Tensor]:
        """Both views' features, rows of ``clients`` side by side, as the server will hold them."""
        wire = self._config.wire
        with torch.set_grad_enabled(self.policy.shapes_features):
            self._own = student.detach().requires_grad_(self.policy.shapes_features)
            self._guarded = self.guarded(self._own, clients)
        with torch.no_grad():
            student = codec_named(wire.student_features).roundtrip(self._guarded.detach())
            teacher = codec_named(wire.teacher_features).roundtrip(self.guarded(teacher, clients))
        self._teacher = teacher
        self._passed = {"student": student.data_ptr(), "teacher": teacher.data_ptr()}
        return student, teacher

    def only(self, rows: Tensor) -> Tensor:
        """Of the teacher's features that just passed, these ``rows``, which alone are sent."""
        self._teacher = self._teacher[rows]
        self._passed["teacher"] = self._teacher.data_ptr()
        return self._teacher

    def gradient(self, received: Tensor) -> Tensor:
        """By the bottom's own features, from the ``received`` one by what was sent of them.

        Without it, a clipped row would be driven outwards for ever: the loss cannot see its length.
        """
        if not self.policy.shapes_features:
            return received
        (gradient,) = torch.autograd.grad(self._guarded, self._own, received)
        return gradient

    def guarded(self, rows: Tensor, clients: int) -> Tensor:
        """Rows clipped, then with noise that every client draws for itself."""
        if not self.policy.shapes_features:
            return rows
        norms = rows.norm(dim=1, keepdim=True)
        unit = norms
        if (clip := self.policy.clip) is not None:
            rows = rows * (clip / norms.clamp(min=clip))
            unit = torch.full_like(norms, clip)
        if not self.policy.noise:
            return rows
        return rows + self.policy.noise * unit * self._draw(rows, clients)

    def _draw(self, rows: Tensor, clients: int) -> Tensor:
        draws = [
            torch.randn(share.shape, generator=generator, device=rows.device, dtype=rows.dtype)
            for share, generator in zip(rows.chunk(clients), self._generators, strict=False)
        ]
        return torch.cat(draws)

    @torch.no_grad()
    def bottom(self, sent: State, trained: State, slot: int = 0) -> State:
        """The bottom that client ``slot`` uploads, having been ``sent`` one and ``trained`` it."""
        limited = self._limited(sent, trained, slot)
        self.leaving_bottom = roundtrip_state(limited, self._config.wire.models)
        self._passed = {
            f"bottom/{name}": tensor.data_ptr() for name, tensor in self.leaving_bottom.items()
        }
        return self.leaving_bottom

    def _limited(self, sent: State, trained: State, slot: int) -> State:
        clip = self.policy.update_clip
        if clip is None:
            return trained
        names = [name for name, tensor in trained.items() if tensor.is_floating_point()]
        moves = {name: trained[name].float() - sent[name].float() for name in names}
        norm = torch.stack([move.norm() for move in moves.values()]).norm()
        share, limited = clip / norm.clamp(min=clip), dict(trained)
        for name, move in moves.items():
            noise = torch.zeros_like(move)
            if self.policy.update_noise:
                noise.normal_(0, self.policy.update_noise * clip, generator=self._generators[slot])
            value = sent[name].float() + move * share + noise
            # Noise may take a variance below zero, where no server believes it.
            value = value.clamp(min=0) if name.endswith("running_var") else value
            limited[name] = value.to(trained[name].dtype)
        return limited

    # --- what a device sends ---------------------------------------------------------------------

    def frame(
        self,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        codecs: Mapping[str, str] | str = "fp32",
    ) -> Parts:
        """The bytes of a frame that may leave; raises `PolicyBreach` for one that may not."""
        assert self._encode is not None, "a simulation sends no frames"
        tensors = tensors or {}
        self._check(kind, tensors)
        return self._encode(kind, fields, tensors, codecs)

    def _check(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        policy = self.policy
        protected = {
            "features": policy.shapes_features,
            "bottom": policy.update_clip is not None,
        }
        if protected.get(kind, False):
            passed = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            if passed != self._passed:
                raise PolicyBreach(f"{kind} did not pass through the policy and are not sent")
            self._passed = {}
        elif kind not in protected and not policy.full_models:
            raise PolicyBreach(f"{kind!r} holds whole models, the policy has full_models = false")
