"""The gated short convolution of LFM2 and LFM3: C * conv(B * x), which has no state but its tail."""

from torch import Size, Tensor

from offload.checkpoint.spec import RecurrentLayer
from offload.model.mixers.base import Mixer


class ShortConv(Mixer):
    """See above."""

    REQUIRED = frozenset({"conv.weight", "in_proj.weight", "out_proj.weight"})
    OPTIONAL = frozenset({"conv.bias", "in_proj.bias", "out_proj.bias"})
    READ = frozenset({"conv"})

    @classmethod
    def fits(cls, shapes: dict[str, Size]) -> bool:
        """See `Mixer`; these are plain names."""
        if not super().fits(shapes):
            return False
        return shapes["in_proj.weight"][0] == 3 * shapes["conv.weight"][0]

    def sizes(self) -> RecurrentLayer:
        """See `Mixer`."""
        num_channels, _, num_taps = self.conv.weight.shape
        row_floats = 4 * num_channels
        return RecurrentLayer(num_taps, num_channels, kept=num_channels, row_floats=row_floats)

    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """See `Mixer`."""
        before, behind, x_TC = self.in_proj(hidden_1TD)[0].chunk(3, -1)
        return self.out_proj((behind * self.convolve(before * x_TC, self.conv))[None])
