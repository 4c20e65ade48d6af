"""Recall: rows read the pages of a store that they want, and the rest stays where it is. Approximate by choice.

Quest (arXiv 2406.10774), ArkVale and YAKV read this way. Always read: sinks, the newest tokens, what was stored since
the last boundary, and whatever stands in front of this store on a ladder.

The choice of a row depends on its own query and on what was stored at the last boundary, and on nothing else: neither
on the rows beside it nor on which of its ancestors are stored already. So the text is that of plain decoding over the
same store, whatever was guessed. For the same reason a certificate weighs what was stored at the boundary only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.merge import Part
from kvcli.kv.index import Index
from kvcli.kv.recall_pages import Budget, Pages, padded
from kvcli.kv.recall_source import Source, Whole
from kvcli.kv.slots import Choose, Sight, Slots, Store, Usage, visible

ROWS = 64  # rows that choose at a time: their scores of all pages exist at once


@dataclass(slots=True)
class Tally:
    """What rows asked for, over all layers and KV heads."""

    asked: int = 0  # choices of a row in a KV head
    streamed: int = 0  # of them, how many read everything because their certificate was refused
    pages: int = 0  # chosen by a pass
    again: int = 0  # of them, how many the pass before had chosen too


class Recall:
    """A store whose rows read a part of it. Prompts are read in full: rows at positions announced by `reserve`.

    Layers with a sliding window, and those not listed, read everything.
    """

    def __init__(
        self,
        store: Store,
        index: Index,
        budget: Budget,
        layers: Collection[int],
        *,
        epsilon: float | None = None,
        source: Source | None = None,
        prefetch: bool = False,
    ) -> None:
        """`epsilon`: a row whose missed softmax mass, of what is stored, may be more reads everything instead.

        `source`: a cheaper way to some slots of the store than all of them. `prefetch`: while a layer is read, tell it
        what the next one will probably want.
        """
        assert epsilon is None or index.is_bound, "a certificate takes an index that bounds"
        self._store, self._index, self._epsilon = store, index, epsilon
        self._source = source or Whole(store)
        self._pages = {layer: Pages(index, budget) for layer in sorted(layers)}
        self._late = dict.fromkeys(self._pages, 0)  # slots a head since the boundary
        self._chosen: dict[int, Tensor] = {}  # [K, P] by the last pass
        self._next = dict(pairwise(self._pages)) if prefetch else {}
        self._changes = store.changes
        self._announced = 0  # positions below are of a prompt
        self.tally = Tally()

    @property
    def dtype(self) -> torch.dtype:
        """The store's."""
        return self._store.dtype

    @property
    def changes(self) -> int:
        """The store's."""
        return self._store.changes

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Tensor) -> list[Part]:
        """q [H, N, D] of rows at positions pos [N] -> what was stored at the boundary, and what since."""
        pages = self._pages.get(layer)
        if pages is None or pages.reads_all or sight.window is not None or int(pos[0]) < self._announced:
            return self._store.attend(layer, q, sight, pos)
        old = [self._recall(layer, pages, rows, sight) for rows in q.split(ROWS, 1)]
        parts = [Part(torch.cat([p.out for p in old], 1), torch.cat([p.lse for p in old], 1))]
        if self._late[layer]:
            s = _near(self._source.gather(layer, pages.since(self._late[layer])), q)
            parts.append(attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=visible(s.pos, pos, None)))
        return parts

    def likely(self, layer: int) -> Tensor | None:
        """[K, M] indices of slots that the next pass probably reads in this layer, -1 = none: those of the last one,
        guesses included, as their queries are the next pass's. None where nothing was chosen yet."""
        chosen = self._chosen.get(layer)
        return None if chosen is None else self._pages[layer].slots_of(padded(chosen))

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store accepted rows, which all rows read until the next boundary."""
        self._store.append(layer, k, v, pos)
        if layer in self._late:
            self._late[layer] += pos.shape[0]

    def slots(self, layer: int) -> Slots:
        """What the store holds."""
        return self._store.slots(layer)

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots; their pages are summarized anew."""
        fell = self._store.keep(layer, mask)
        self._learn([layer])
        return fell

    def settle(self, choose: Choose | None) -> None:
        """A boundary: what is stored now is what rows choose from."""
        self._store.settle(choose)
        self._learn(self._pages)

    def crop(self, n: int) -> None:
        """Forget positions from n on."""
        self._store.crop(n)
        self._announced = min(self._announced, n)
        for pages in self._pages.values():
            pages.crop(n)
        self._changes = self._store.changes
        self._learn(self._pages)

    def reserve(self, n: int) -> None:
        """A text of n tokens is about to be stored; all but its last are read in full."""
        self._announced = n - 1
        self._store.reserve(n)

    def usage(self) -> list[Usage]:
        """The store's, and the index as a tier of its own."""
        index = [
            Usage(layer, "index", p.last.shape[1] * self._index.page, _nbytes(p.tensors))
            for layer, p in self._pages.items()
        ]
        return [*self._store.usage(), *index]

    def _learn(self, layers: Collection[int]) -> None:
        is_stale = self._store.changes != self._changes
        self._changes = self._store.changes
        for layer in layers:
            if layer in self._pages:
                if is_stale:
                    self._pages[layer].clear()
                self._pages[layer].settle(layer, self._source)
                self._late[layer] = 0
                self._chosen.pop(layer, None)

    def _recall(self, layer: int, pages: Pages, q: Tensor, sight: Sight) -> Part:
        """q [H, N, D] -> attention over the chosen pages, or over everything where a certificate was refused."""
        n_kv = pages.whole.shape[0]
        rows = q.unflatten(0, (n_kv, -1))  # [K, G, N, D]
        score = self._index.score(rows.flatten(1, 2), pages.kept, pages.shared, sight)
        score = score.unflatten(1, rows.shape[1:3]).masked_fill(~pages.held[:, None, None], -torch.inf)  # [K, G, N, P]
        chosen = _choose(score, pages)  # [K, N, P]
        self._count(layer, chosen)
        part = self._read(layer, pages, q, chosen, sight)
        if self._epsilon is not None:
            missed = score.masked_fill(chosen.unsqueeze(1), -torch.inf).logsumexp(-1)  # [K, G, N]
            self._certify(layer, pages, rows, missed, part, sight)
        return part

    def _read(self, layer: int, pages: Pages, q: Tensor, chosen: Tensor, sight: Sight) -> Part:
        """All rows over the union of what they chose, each seeing its own choice."""
        union = padded(chosen.any(1))  # [K, U]
        behind = pages.behind()
        index = torch.cat((pages.slots_of(union), behind), 1)
        s = _near(self._source.gather(layer, index), q)
        n_rows = q.shape[1]
        mine = chosen.gather(2, union.clamp(min=0).unsqueeze(1).expand(-1, n_rows, -1))  # [K, N, U]
        mine = mine.repeat_interleave(self._index.page, 2)
        mask = torch.nn.functional.pad(mine, (0, behind.shape[1]), value=True) & (s.pos >= 0).unsqueeze(1)
        return attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=mask)

    def _certify(self, layer: int, pages: Pages, rows: Tensor, missed: Tensor, part: Part, sight: Sight) -> None:
        """Rewrite in `part` what may have missed too much: rows [K, G, N, D], bounds on the log of it [K, G, N]."""
        out, lse = (t.unflatten(0, rows.shape[:2]) for t in (part.out, part.lse))
        share = torch.sigmoid(missed - lse)
        # NaN, from keys that are not finite, is refused; a row that missed nothing is not
        refused = (~(share <= self._epsilon) & (missed != -torch.inf)).any(1)  # [K, N]
        self.tally.streamed += int(refused.sum())
        for j in refused.any(1).nonzero().flatten().tolist():
            s = _near(self._source.head(layer, j, int(pages.ends[j])), part.out)
            mine = refused[j]
            q = rows[j][:, mine]
            mask = visible(s.pos, s.pos.new_zeros(q.shape[1]), None)
            full = attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=mask)
            out[j][:, mine], lse[j][:, mine] = full.out, full.lse

    def _count(self, layer: int, chosen: Tensor) -> None:
        """Note what a pass chose [K, N, P], and have the next layer's likely choice fetched."""
        union, before = chosen.any(1), self._chosen.get(layer)
        self.tally.asked += chosen.shape[0] * chosen.shape[1]
        self.tally.pages += int(union.sum())
        if before is not None:
            self.tally.again += int((union & before).sum())
        self._chosen[layer] = union
        if layer in self._next and (ahead := self.likely(self._next[layer])) is not None:
            self._source.warm(self._next[layer], ahead)


def _choose(score: Tensor, pages: Pages) -> Tensor:
    """score [K, G, N, P] -> [K, N, P]: the best `most` pages of each row and KV head, and those always read.

    By the largest share of mass that a page has in any query head of the group: heads differ in scale.
    """
    share = (score - score.logsumexp(-1, keepdim=True)).amax(1)  # [K, N, P]
    best = share.masked_fill(~pages.open.unsqueeze(1), -torch.inf).topk(pages.most, -1).indices
    chosen = torch.zeros_like(share, dtype=torch.bool).scatter_(2, best, True)
    return chosen & pages.open.unsqueeze(1) | pages.always.unsqueeze(1)


def _near(s: Slots, like: Tensor) -> Slots:
    """On the device that computes."""
    return Slots(*(t.to(like.device) for t in (s.k, s.v, s.pos)))


def _nbytes(tensors: Collection[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
