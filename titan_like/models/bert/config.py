"""The shape of a BERT model: bidirectional attention, learned positions, LayerNorm, GELU, biases, dropout."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from titan_like.models.gpt.config import GPTConfig


class BertConfig(GPTConfig):
    """The shape of BERT (arXiv 1810.04805) and Megatron-LM's BERT models (arXiv 1909.08053)."""

    objective: ClassVar = "mlm"
    supports_masks: ClassVar[bool] = False
    not_in_weights: ClassVar = frozenset({"init_std", "dropout", "sentence_head"})
    num_token_types: int = Field(
        2, gt=0, le=2**20, description="rows of the token-type table; the second is for the second of two sentences"
    )
    norm_placement: Literal["pre", "post"] = Field(
        "pre",
        description="pre: a norm before attention and MLP and one after the last layer (Megatron-LM); post: a norm "
        "after each residual sum and after the embeddings (the original BERT)",
    )
    sentence_head: Literal["none", "pair", "choice"] = Field(
        "none",
        description="what the first token predicts. pair: the class of a pair of sentences, in addition to masked "
        "tokens (data.sentence_objective); choice: the score of an answer, in place of tokens (data.dataset race)",
    )

    @model_validator(mode="before")
    @classmethod
    def _untie(cls, values: dict) -> dict:
        return {"tied_embeddings": False, **values} if values.get("sentence_head") == "choice" else values

    def broken_rules(self) -> Iterator[str]:
        """As in the base class."""
        yield from super().broken_rules()
        if self.sentence_head == "choice" and self.tied_embeddings:
            yield "sentence_head choice has no output matrix to tie; set tied_embeddings to false"
        if self.sentence_head != "none" and self.num_token_types < 2:
            yield f"sentence_head {self.sentence_head} needs two token types; set num_token_types to 2"

    @property
    def predictions(self) -> tuple[str, ...]:
        """Masked tokens, and what the head of the first token predicts."""
        return {"none": ("tokens",), "pair": ("tokens", "pair"), "choice": ("choice",)}[self.sentence_head]
