"""Control everything that leaves a client, simulated or real.

In a simulation it turns features and bottoms into what the server will hold: clipped, with noise,
as the codec leaves them. On a device it also makes every frame that is sent, the first hello
included. A frame takes tensors only as `Cleared`, and only the policy makes that type.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import Any

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.engine.hardware import Hardware
from semisfl.engine.weights import State
from semisfl.fleet.codec import codec_named, roundtrip_state
from semisfl.fleet.consent import about_batch, about_codec, objections
from semisfl.fleet.noise import add_noise, secret_normal
from semisfl.settings.config import Config
from semisfl.settings.policy import DevicePolicy, Policy, PolicyBreach, stricter

Parts = list[bytes | memoryview]
Encode = Callable[[str, Mapping[str, Any], Mapping[str, Tensor], Mapping[str, str] | str], Parts]

EXACT = torch.float64
"""The dtype of norms. A sum in float32 loses small squares, and a planted bottom can make millions."""
LARGEST = 1e20
"""Values beyond this count as this before they are clipped: the factor that clips them would be too small to be exact."""
_POLICY = object()
"""Known to this module alone, so that nothing else can make a `Cleared`."""


class Cleared:
    """Hold named tensors that passed a policy and may leave in one frame of one kind."""

    def __init__(self, token: object, kind: str, policy: Policy, tensors: Mapping[str, Tensor]):
        if token is not _POLICY:
            raise TypeError("only a policy clears tensors: pass them through `Outgoing`")
        self.kind, self.policy = kind, policy
        self._tensors = dict(tensors)
        self._sent = False

    @property
    def tensors(self) -> State:
        """Return a copy of the dict: adding to it clears nothing."""
        return dict(self._tensors)

    def under(self, prefix: str) -> "Cleared":
        """Return the same with every name as ``prefix/name``."""
        named = {f"{prefix}/{name}": tensor for name, tensor in self._tensors.items()}
        return Cleared(_POLICY, self.kind, self.policy, named)

    def packed(self, pack: Callable[[Mapping[str, Tensor]], Tensor]) -> "Cleared":
        """Return the same as the bytes that ``pack`` makes of the tensors, under the name ``rows``."""
        return Cleared(_POLICY, self.kind, self.policy, {"rows": pack(self._tensors)})

    def take(self, kind: str, policy: Policy) -> State:
        """Return the tensors for one frame; raise `PolicyBreach` if they may not leave in it."""
        if self._sent or (self.kind, self.policy) != (kind, policy):
            raise PolicyBreach(f"{kind} did not pass through the policy and are not sent")
        self._sent = True
        return self._tensors


@dataclass(frozen=True)
class ClippedFeatures:
    """Hold a client's own features, and the same after clipping. Noise does not change gradients."""

    own: Tensor
    clipped: Tensor

    def gradient(self, received: Tensor) -> Tensor:
        """Back-propagate the received gradient through clipping.

        Without it, a clipped row would grow for ever: the loss cannot see its length.
        """
        if not self.clipped.requires_grad:
            return received
        (gradient,) = torch.autograd.grad(self.clipped, self.own, received)
        return gradient


class Outgoing:
    """Apply the policy to all that a client sends.

    ``encode`` makes frames on a device; it is None in a simulation. With ``unpredictable``, noise is
    made of the operating system's random bytes and not of the run's seed, which the server knows.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        encode: Encode | None = None,
        *,
        unpredictable: bool = False,
    ) -> None:
        own = DevicePolicy.model_validate(dict(policy or {}))
        self.own = own if encode is None else own.of_device()
        """This client's own policy."""
        self.policy = self.own
        """The policy in force: the stricter of its own and the run's in each line."""
        self._encode = encode
        self._unpredictable = unpredictable
        self._generators: list[torch.Generator] = []
        self.secret = b""
        """Decides a device's noise on the rows of a frozen bottom: rows that are sent again have the same noise."""
        self._streams: list[Callable[[int], bytes]] = []

    def agree(self, config: Config) -> None:
        """Accept the run's ``config``; raise `PolicyBreach` if a policy forbids its terms."""
        self.policy = stricter(self.own, config.policy)
        self._streams.clear()  # noise of other terms is not used again
        broken = [*objections(self.own, config), *objections(config.policy, config)]
        # In a simulation nobody's images are at stake, and a frozen bottom has no steps.
        if self._unpredictable and config.clients.bottom == "trained":
            broken += about_batch(self.own, config.clients.batch)
        if broken:
            raise PolicyBreach("; ".join(dict.fromkeys(broken)))
        self._config = config

    def draw_from(self, config: Config, generators: Sequence[torch.Generator]) -> None:
        """Set the config and generators directly; the leakage meter uses this."""
        self._config, self._generators = config, list(generators)

    # --- what a round sends ----------------------------------------------------------------------

    def start_round(self, index: int, clients: Sequence[int], hardware: Hardware) -> None:
        """Seed the generators of a simulated round's noise."""
        if self._unpredictable or not (self.policy.noise or self.policy.update_noise):
            return
        while len(self._generators) < len(clients):
            self._generators.append(hardware.generator(0))
        for generator, client in zip(self._generators, clients, strict=False):
            generator.manual_seed(seeds.derive(self._config.seed, "policy", index, client))

    def features(
        self, student: Tensor, teacher: Tensor, clients: int
    ) -> tuple[Cleared, ClippedFeatures]:
        """Clear both views' features, as the server will hold them; rows of ``clients`` side by side.

        Also return what the student's gradients go back through.
        """
        wire, clips = self._config.wire, self.policy.clip is not None
        with torch.set_grad_enabled(clips):
            own = student.detach().requires_grad_(clips)
            guarded = ClippedFeatures(own, self.clip_rows(own))
        with torch.no_grad():
            student = self._add_noise(guarded.clipped.detach(), clients)
            student = codec_named(wire.student_features).roundtrip(student)
            teacher = codec_named(wire.teacher_features).roundtrip(
                self.clip_and_noise(teacher, clients)
            )
        both = {"student": student, "teacher": teacher}
        return Cleared(_POLICY, "features", self.policy, both), guarded

    def clip_and_noise(self, rows: Tensor, clients: int) -> Tensor:
        """Return clipped rows with noise, which every client draws from its own generator."""
        return self._add_noise(self.clip_rows(rows), clients)

    def clip_rows(self, rows: Tensor) -> Tensor:
        """Return rows with the policy's largest norm; NaN and Inf, which would show through, become 0."""
        if (clip := self.policy.clip) is None:
            return rows
        rows = _bound(rows)
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=EXACT)
        return rows * (clip / norm.clamp(min=clip)).to(rows.dtype)

    def _add_noise(self, rows: Tensor, clients: int) -> Tensor:
        if not (self.policy.noise and self.policy.clip):
            return rows
        shares = rows.chunk(clients)
        drawn = [self._normal(share, slot) for slot, share in enumerate(shares)]
        return add_noise(rows, self.policy.noise * self.policy.clip, torch.cat(drawn))

    def _normal(self, like: Tensor, slot: int) -> Tensor:
        """Return standard normal values of the shape of ``like`` for client ``slot``."""
        if self._unpredictable:
            return secret_normal(
                like.shape, like.device, self._streams[slot] if self._streams else os.urandom
            )
        generator = self._generators[slot]
        return torch.randn(like.shape, generator=generator, device=like.device)

    @torch.no_grad()
    def views(self, rows: Tensor, weak: int, noise_seeds: Sequence[int]) -> Cleared:
        """Clear the rows [images, views, d] of a frozen bottom, the ``weak`` views of each image first.

        An image's noise follows from its own seed in ``noise_seeds``, and on a device from its secret too.
        """
        drawn = noise_seeds if self.policy.noise else ()
        if self._unpredictable:
            self._streams = [shake_256(self.secret + str(seed).encode()).digest for seed in drawn]
        else:
            self._generators = [torch.Generator(rows.device).manual_seed(seed) for seed in drawn]
        limited = self.clip_and_noise(rows.flatten(0, 1), len(rows)).view_as(rows)
        parts = {"weak": limited[:, :weak], "strong": limited[:, weak:]}
        named = {kind: part.flatten(0, 1) for kind, part in parts.items()}
        return Cleared(_POLICY, "rows", self.policy, named)

    def codec(self, chosen: str | None) -> str:
        """Return the codec of features to classify; raise `PolicyBreach` if ``chosen`` is too fine.

        None: the policy's, else fp32.
        """
        codec = chosen or self.policy.codec or "fp32"
        if reasons := about_codec(self.policy, "--codec", codec):
            raise PolicyBreach(reasons[0])
        return codec

    @torch.no_grad()
    def answerable(self, rows: Tensor) -> Cleared:
        """Clear the features of images that a server is to classify."""
        return Cleared(_POLICY, "features", self.policy, {"features": self.clip_and_noise(rows, 1)})

    @torch.no_grad()
    def bottom(self, sent: State, trained: State, slot: int = 0) -> Cleared:
        """Clear the bottom that client ``slot`` was ``sent`` and has ``trained``, as the server will hold it."""
        limited = self._limit_change(sent, trained, slot)
        bottom = roundtrip_state(limited, self._config.wire.models)
        return Cleared(_POLICY, "bottom", self.policy, bottom)

    def _limit_change(self, sent: State, trained: State, slot: int) -> State:
        clip = self.policy.update_clip
        if clip is None:
            return trained
        names = [name for name, tensor in trained.items() if tensor.is_floating_point()]
        moves = {name: _bound(trained[name].float() - sent[name].float()) for name in names}
        norms = [torch.linalg.vector_norm(move, dtype=EXACT) for move in moves.values()]
        share, limited = clip / torch.stack(norms).norm().clamp(min=clip), dict(trained)
        for name, move in moves.items():
            move = move * share.float()
            if self.policy.update_noise:
                move = add_noise(move, self.policy.update_noise * clip, self._normal(move, slot))
            value = sent[name].float() + move
            # Noise can make a variance negative, which every server refuses.
            value = value.clamp(min=0) if name.endswith("running_var") else value
            limited[name] = value.to(trained[name].dtype)
        return limited

    def models(self, tensors: Mapping[str, Tensor]) -> Cleared:
        """Clear whole models; raise `PolicyBreach` if the policy keeps them on the device."""
        if self.policy.full_models is False:
            raise PolicyBreach("'states' holds whole models, the policy has full_models = false")
        return Cleared(_POLICY, "states", self.policy, tensors)

    # --- what a device sends ---------------------------------------------------------------------

    def frame(
        self,
        kind: str,
        fields: Mapping[str, Any],
        cleared: Cleared | None = None,
        codecs: Mapping[str, str] | str = "fp32",
    ) -> Parts:
        """Return the bytes of a frame; raise `PolicyBreach` for tensors that may not leave in it."""
        assert self._encode is not None, "a simulation sends no frames"
        if cleared is not None and not isinstance(cleared, Cleared):
            raise PolicyBreach(f"{kind} did not pass through the policy and are not sent")
        tensors = {} if cleared is None else cleared.take(kind, self.policy)
        return self._encode(kind, fields, tensors, codecs)


def _bound(values: Tensor) -> Tensor:
    """Return values without NaN and Inf, which would show through any clip, and none beyond `LARGEST`."""
    return values.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)
