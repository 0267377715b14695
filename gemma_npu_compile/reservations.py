"""Blocks set aside for admitted requests, so that none of them can run out of memory in flight."""

from collections.abc import Sequence

from gemma_npu_compile.kv_cache import PagedKVCache


class Reservations:
    """What the requests of one cache may hold at most, by KV group.

    A row takes blocks as it grows and a sliding one gives back what leaves its window; as long as only rows with a
    reservation grow, the blocks are there.

    Args:
        cache: nobody else may take its rows.
        ahead: tokens that steps not read yet, and the next one, may write.
    """

    def __init__(self, cache: PagedKVCache, ahead: int) -> None:
        self._cache, self._ahead = cache, ahead
        self._blocks = [group.num_blocks - group.null_blocks for group in cache.groups]
        self.taken = [0] * len(cache.groups)

    def needs(self, prompt: int, new: int, max_model_len: int) -> tuple[int, ...]:
        """Blocks a request of ``prompt`` tokens and at most ``new`` new ones holds at its fullest, by group.

        Raises:
            ValueError: the cache could never hold it; names the limit.
        """
        if prompt + new > max_model_len:
            raise ValueError(
                f"prompt_ids has {prompt} tokens and max_new_tokens is {new}, together more than max_model_len, "
                f"{max_model_len}"
            )
        longest = max(prompt, prompt + new - 2 + self._ahead)  # the last token but one is in the cache, at most
        at_once = max(self._cache.prefill_chunk, self._ahead)
        needs = tuple(group.most_blocks(longest, at_once) for group in self._cache.groups)
        for group, need, there in zip(self._cache.groups, needs, self._blocks, strict=True):
            if need > there:
                raise ValueError(
                    f"a prompt of {prompt} tokens and max_new_tokens={new} need {need} blocks of KV group "
                    f"{group.name!r}, the cache has {there} (num_blocks)"
                )
        return needs

    def fit(self, wanted: Sequence[tuple[int, ...]]) -> bool:
        """Whether requests with these needs could be admitted together."""
        totals = [sum(column) for column in zip(self.taken, *wanted, strict=True)]
        return all(total <= there for total, there in zip(totals, self._blocks, strict=True))

    def take(self, needs: tuple[int, ...]) -> None:
        """Set ``needs`` aside."""
        self.taken = [taken + need for taken, need in zip(self.taken, needs, strict=True)]

    def give_back(self, needs: tuple[int, ...]) -> None:
        """The request has ended."""
        self.taken = [taken - need for taken, need in zip(self.taken, needs, strict=True)]
