"""A transformer in numbers: its parameters, floating-point operations, and the activations that it stores.

Symbols as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022: s positions, b
samples, h width, a heads, L layers, t ranks of tensor parallelism, v entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder of `layers` equal layers with attention and an MLP, an embedding before them and a head after them.

    - `heads` of `head_width` numbers; `kv_heads` of them for keys and values (grouped-query attention).
    - `hidden`: the width of the MLP; `gated`: it has three matrices instead of two (SwiGLU, Shazeer 2020).
    - `positions`: the maximum sequence; `learned`: they have an embedding.
    - `biases`: linear layers and norms have biases; otherwise norms have a scale only (RMSNorm).
    - `tied`: the head uses the matrix of the embedding.
    - `dropout`: each layer stores the masks of its dropouts.
    """

    title: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    positions: int
    gated: bool
    learned: bool
    biases: bool
    tied: bool
    dropout: bool = False

    # ---- parameters

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied matrix counts once."""
        return self.layers * self.of_layer() + self.before() + self.after() - self.tied * self.table

    def of_layer(self, tensor: int = 1) -> int:
        """Parameters of a layer on one of `tensor` ranks that split its matrices; norms and the biases of outputs are
        on all ranks."""
        whole = 2 * (1 + self.biases) * self.width + self.biases * 2 * self.width
        return self.of_matrices // tensor + self.biases * (self._projected + self._mlp_inputs) // tensor + whole

    def before(self, tensor: int = 1) -> int:
        """Parameters of the embedding, whose tokens are split by vocabulary."""
        return self.table // tensor + self.learned * self.positions * self.width

    def after(self, tensor: int = 1) -> int:
        """Parameters of the final norm and of the head."""
        return self.table // tensor + (1 + self.biases) * self.width

    @property
    def of_matrices(self) -> int:
        """Parameters in the matrices of a layer."""
        return (self._projected + self._attended) * self.width + (self._mlp_inputs + self.hidden) * self.width

    @property
    def table(self) -> int:
        """Parameters in the matrix of the embedding, and in that of the head."""
        return self.vocabulary * self.width

    @property
    def _attended(self) -> int:
        """Numbers per position in the queries, and in the output of attention."""
        return self.heads * self.head_width

    @property
    def keys_and_values(self) -> int:
        """Numbers per position in the keys and values of a layer."""
        return 2 * self.kv_heads * self.head_width

    @property
    def _projected(self) -> int:
        return self._attended + self.keys_and_values

    @property
    def _mlp_inputs(self) -> int:
        return (1 + self.gated) * self.hidden

    # ---- floating-point operations of one token, forward

    def layer_flops(self, sequence: int) -> int:
        """FLOPs of a layer per token of a sequence: 2 per parameter of a matrix, and 4·s per number of the queries in
        attention; the causal mask saves nothing (Narayanan et al. 2021, appendix)."""
        return 2 * self.of_matrices + 4 * sequence * self._attended

    @property
    def head_flops(self) -> int:
        """FLOPs of the head per token."""
        return 2 * self.table

    def training_flops(self, sequence: int) -> int:
        """FLOPs of forward and backward per token: three times those of forward. Recomputation is not included, as in
        MFU."""
        return 3 * (self.layers * self.layer_flops(sequence) + self.head_flops)

    # ---- activations, in bytes

    def layer_activations(
        self,
        tokens: float,
        sequence: int,
        tensor: int,
        wide: int,
        attention: str,
        kept: tuple[float, float] = (1.0, 1.0),
    ) -> float:
        """Bytes that a layer stores for backward, for `tokens` positions on a rank, `wide` bytes per number; `kept` are
        the numbers that a framework keeps in attention and in the MLP, relative to the formula.

        With eager attention, dropout and two matrices in the MLP, this is Korthikanti's formula for sequence
        parallelism, sbh/t · (34 + 5as/h) in 16 bits; fused attention (FlashAttention, Dao et al. 2022) stores one
        32-bit number per head and position instead of the matrices of attention.
        """
        norms = 4 * self.width  # inputs and outputs of both norms
        attended = 2 * self._attended + self.keys_and_values  # queries, keys, values, output
        mlp = (4 if self.gated else 2) * self.hidden  # inputs and outputs of the activation; up, and the product
        masks = 2 * self.width * self.dropout  # one byte per number
        numbers = wide * (norms + kept[0] * attended + kept[1] * mlp) + masks
        return tokens * (numbers + self.heads * _ATTENTION[attention](sequence, wide, self.dropout)) / tensor

    def layer_input(self, tokens: float, tensor: int, wide: int) -> float:
        """Bytes of a layer's input, all that it stores if backward recomputes it."""
        return tokens * wide * self.width / tensor

    def head_activations(self, tokens: float, tensor: int, wide: int, logits: float = 0.0) -> float:
        """Bytes that the end of the model stores: inputs of norm and head, and for each logit `logits` bytes, or 0 for
        itself, its log-softmax in 32 bits (torch also stores a 32-bit copy of 16-bit logits) and its gradient."""
        each = logits or wide + 4 + 4 + (4 if wide < 4 else 0)
        return tokens * (2 * wide * self.width + each * self.vocabulary) / tensor

    # ---- what the kernels of a layer move and multiply

    def products(self, tokens: float, tensor: int) -> tuple[tuple[float, float, float], ...]:
        """Rows, columns and inner width of the matrix products of a layer in forward, on one of `tensor` ranks."""
        return (
            (tokens, self._projected / tensor, self.width),
            (tokens, self.width, self._attended / tensor),
            (tokens, self._mlp_inputs / tensor, self.width),
            (tokens, self.width, self.hidden / tensor),
        )

    @property
    def moved(self) -> int:
        """Numbers per token that the operations between the matrix products of a layer read and write, forward and
        backward, if each reads its inputs and writes its outputs once: norms, residuals and rotations, activation."""
        return 20 * self.width + (10 if self.gated else 6) * self.hidden


# Bytes per head and position that attention stores: fused, the logarithm of each row's sum; eager, the matrix of its
# weights, with dropout also its mask and the masked weights.
_ATTENTION: dict[str, Callable[[int, int, bool], int]] = {
    "fused": lambda sequence, wide, dropout: 4,
    "eager": lambda sequence, wide, dropout: sequence * (wide + dropout * (1 + wide)),
}
ATTENTIONS = tuple(_ATTENTION)
