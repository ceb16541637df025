"""Planted mistakes: each is one wrong line of the package, with what it breaks.

They measure the tests. ``python -m tests.mutants`` plants one after the other in a copy of the package and runs the
tests until one fails. A mistake that no test finds is the argument for a test. They are kept as descriptions: where
code moves, ``old`` and ``new`` are written anew, and the name and its meaning stay.
"""

from dataclasses import dataclass

__all__ = ["PLANTED", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in ``path`` of the package, is replaced by ``new``."""

    name: str
    area: str
    path: str
    old: str
    new: str


PLANTED = [
    # split and routes
    Mutant(
        "a vertex at a boundary belongs to the rank before",
        "split",
        "minibatch/split.py",
        'np.searchsorted(boundaries[1:-1], ids, side="right")',
        'np.searchsorted(boundaries[1:-1], ids, side="left")',
    ),
    Mutant(
        "received rows are read in the reverse order",
        "split",
        "minibatch/split.py",
        "frontier.resolve(drawn, request.places + num_local)",
        "frontier.resolve(drawn, request.places.flip(0) + num_local)",
    ),
    Mutant(
        "a boundary puts received rows in the order of drawing, not of owners",
        "route",
        "minibatch/split.py",
        "recv_places[places] = others",
        "recv_places[:] = others",
    ),
    Mutant(
        "rows sent and received are counted the wrong way round in backward",
        "route",
        "minibatch/route.py",
        'telemetry.count("bytes_sent", (back if backward else there) * row_bytes)',
        'telemetry.count("bytes_sent", (there if backward else back) * row_bytes)',
    ),
    # shuffle
    Mutant(
        "a boundary forgets the gradient of the destinations",
        "shuffle",
        "minibatch/shuffle.py",
        "another branch too\n        g_mixed[: route.num_dst] += g_dst\n",
        "another branch too\n",
    ),
    Mutant(
        "the incoming gradient is changed in place",
        "shuffle",
        "minibatch/shuffle.py",
        "g = g_dst.new_zeros(ctx.shape) if g_mixed is None else g_mixed.clone()",
        "g = g_dst.new_zeros(ctx.shape) if g_mixed is None else g_mixed",
    ),
    Mutant(
        "gradients returned by the second and further receivers are dropped",
        "shuffle",
        "kernels/rows.py",
        "            k = following[k]\n        if i < g_dst.shape[0]:",
        "            k = -1\n        if i < g_dst.shape[0]:",
    ),
    Mutant(
        "rows that only other ranks read get a gradient that was left in memory",
        "shuffle",
        "minibatch/shuffle.py",
        "    g[route.num_own :] = 0  # read by other ranks only\n",
        "",
    ),
    Mutant(
        "a fused layer ignores the gradients of rows that other ranks have read",
        "shuffle",
        "nn/fused_layers.py",
        "returned = (*list_places(exchange.route.send_rows.numpy(), num_own), addresses)",
        "returned = sums_numba.NOTHING_RETURNED",
    ),
    Mutant(
        "memory of a batch is used again while a graph holds it",
        "shuffle",
        "kernels/buffers.py",
        "weakref.finalize(array, self._free.append, buffer)",
        "self._free.append(buffer)",
    ),
    # draws
    Mutant(
        "the last neighbour of a list is never drawn",
        "draws",
        "sampling/kernels_numba.py",
        "bounded(mix(key, np.uint64(slot)), before + np.uint64(slot) + _ONE)",
        "bounded(mix(key, np.uint64(slot)), max(before + np.uint64(slot), _ONE))",
    ),
    Mutant(
        "a neighbour of a long list is drawn twice",
        "draws",
        "sampling/kernels_numba.py",
        "        if repeated:\n",
        "        if repeated and degree < 128:\n",
    ),
    Mutant(
        "all layers draw by the same numbers",
        "draws",
        "sampling/minibatch.py",
        "return of_step if self.layer_dependency else scalar.mix(of_step, layer)",
        "return of_step",
    ),
    Mutant(
        "a draw does not depend on the epoch",
        "draws",
        "sampling/minibatch.py",
        "of_step = scalar.mix(self.seed, _Domain.NEIGHBORS, self.epoch, self.step)",
        "of_step = scalar.mix(self.seed, _Domain.NEIGHBORS, 0, self.step)",
    ),
    Mutant(
        "neighbours are drawn by internal ids",
        "draws",
        "sampling/kernels_numba.py",
        "pick_positions(mix(key, np.uint64(original[local] if original.size else frontier[i])), degree, count, picks)",
        "pick_positions(mix(key, np.uint64(frontier[i])), degree, count, picks)",
    ),
    Mutant(
        "LABOR draws by internal ids",
        "draws",
        "sampling/draws.py",
        'if options.sampler == "labor" and store.is_renumbered:',
        'if options.sampler == "labor" and not store.is_renumbered:',
    ),
    Mutant(
        "an edge of weight 0 is drawn",
        "draws",
        "sampling/kernels_select.py",
        "            if weights[e] > 0:\n                positive += 1",
        "            if weights[e] >= 0:\n                positive += 1",
    ),
    Mutant(
        "all draws with replacement take the same edge",
        "draws",
        "sampling/kernels_select.py",
        "places[begin + slot] = start + np.int64(bounded(mix(word, np.uint64(slot)), degree))",
        "places[begin + slot] = start + np.int64(bounded(mix(word, np.uint64(0)), degree))",
    ),
    # targets
    Mutant(
        "targets are in the same order in every epoch",
        "targets",
        "sampling/minibatch.py",
        "return unpermute(list_positions, num_targets, scalar.mix(seed, _Domain.TARGETS, epoch))",
        "return unpermute(list_positions, num_targets, scalar.mix(seed, _Domain.TARGETS, 0))",
    ),
    Mutant(
        "the last target of a step is left out",
        "targets",
        "sampling/targets.py",
        "np.searchsorted(positions, [step * batch_size, (step + 1) * batch_size])",
        "np.searchsorted(positions, [step * batch_size, (step + 1) * batch_size - 1])",
    ),
    Mutant(
        "the mean of a short last step is over a whole one",
        "targets",
        "sampling/targets.py",
        "return min((step + 1) * batch_size, self.num_targets) - step * batch_size",
        "return batch_size",
    ),
    # gradients
    Mutant(
        "the gradient of the loss lacks the number of ranks",
        "gradients",
        "minibatch/loss.py",
        "return (g * factor).expand(ctx.shape), None, None, None",
        "return g.expand(ctx.shape), None, None, None",
    ),
    Mutant(
        "an accumulated gradient is replaced",
        "gradients",
        "nn/gradients.py",
        "parameter.grad = average if before is None else before.add_(average)",
        "parameter.grad = average",
    ),
    Mutant(
        "an average is read before it has arrived",
        "gradients",
        "nn/gradients.py",
        "        self._work.wait()\n",
        "",
    ),
    Mutant(
        "gathered rows return the gradient of this rank alone",
        "gradients",
        "minibatch/loss.py",
        "ctx.mesh.world.all_reduce(ctx.call, summed).wait()",
        "pass",
    ),
    # dropout
    Mutant(
        "all dropouts of a step have the same mask",
        "dropout",
        "sampling/minibatch.py",
        "return scalar.mix(self.seed, _Domain.DROPOUT, self.epoch, self.step, call)",
        "return scalar.mix(self.seed, _Domain.DROPOUT, self.epoch, self.step)",
    ),
    Mutant(
        "the mask belongs to the row and not to its vertex",
        "dropout",
        "nn/forward_pass.py",
        "return kernels_torch.mix(key, batch.frontier(rows.layer).names[: num_rows(self.batch, rows)])",
        "return kernels_torch.mix(key, torch.arange(num_rows(self.batch, rows), device=batch.x.device))",
    ),
    Mutant(
        "dropout lets the gradient of dropped elements pass",
        "dropout",
        "nn/dropout.py",
        "return _apply(g, ctx.row_keys, ctx.p), None, None",
        "return g / (1 - ctx.p), None, None",
    ),
    # norm
    Mutant(
        "the variance over ranks lacks the distance of their means",
        "norm",
        "nn/norm.py",
        "variance = (squares + counts * (means - mean) ** 2).sum(0) / total",
        "variance = squares.sum(0) / total",
    ),
    Mutant(
        "batch norm sums its gradients over this rank alone",
        "norm",
        "nn/norm.py",
        'ctx.comm.all_reduce(Call(f"{ctx.call.name} backward", ctx.call.step), sums).wait()',
        "pass",
    ),
    # layers
    Mutant(
        "GCN normalises self-loops twice",
        "layers",
        "graph/degrees.py",
        "                loop_weight[row] = weight  # of several self-loops PyG keeps the last\n            else:\n",
        "                loop_weight[row] = weight  # of several self-loops PyG keeps the last\n            if True:\n",
    ),
    Mutant(
        "the gradient of a mean is that of a sum",
        "layers",
        "nn/fused_layers.py",
        '                mean = ctx.reduction == "mean"\n',
        "                mean = False\n",
    ),
    Mutant(
        "attention divides by a sum that leaves out an edge",
        "layers",
        "kernels/attention_numba.py",
        "            total += scores[e, h]\n",
        "            total += scores[e, h] if e > 0 else 0\n",
    ),
    # pairs
    Mutant(
        "both ends of a negative pair are drawn by the same number",
        "pairs",
        "sampling/pairs.py",
        "draw_vertices(key.negatives(), positions[pair], 2 * slot + 1, len(sources))",
        "draw_vertices(key.negatives(), positions[pair], 2 * slot, len(sources))",
    ),
    Mutant(
        "the reverse edges of pairs stay in the mini-batch",
        "pairs",
        "sampling/excluded.py",
        "        if reverse:\n            src, dst = torch.cat([src, dst]), torch.cat([dst, src])\n",
        "",
    ),
    Mutant(
        "every replica takes all pairs",
        "pairs",
        "loading/link_loader.py",
        "return (places % mesh.num_replicas == mesh.replica) & (owners == mesh.split_rank)",
        "return owners == mesh.split_rank",
    ),
    # types
    Mutant(
        "all relations draw by the same numbers",
        "types",
        "sampling/relations.py",
        "return [key] if num_relations == 1 else [scalar.mix(key, relation) for relation in range(num_relations)]",
        "return [key] * num_relations",
    ),
    Mutant(
        "received rows of a type are counted from its first row",
        "types",
        "minibatch/typed.py",
        "places = torch.cat([self.places, appended.places + before[types]])",
        "places = torch.cat([self.places, appended.places])",
    ),
    Mutant(
        "destinations of a boundary are counted among the local rows",
        "types",
        "minibatch/typed.py",
        "num_dst = mixed.counts(route.num_dst)\n",
        "num_dst = local.counts(route.num_dst)\n",
    ),
    # times
    Mutant(
        "an edge at the time of the target is not drawn",
        "times",
        "sampling/temporal.py",
        "if edge_time[start + position] <= time:",
        "if edge_time[start + position] < time:",
    ),
    Mutant(
        "the last edges are the first ones",
        "times",
        "sampling/temporal.py",
        "picks[j] = np.uint64(until[i] - count + j)",
        "picks[j] = np.uint64(j)",
    ),
    Mutant(
        "negatives have the first time of the step",
        "times",
        "sampling/pairs.py",
        "neg_dst=self.neg_dst * times.numel() + of_negatives,",
        "neg_dst=self.neg_dst * times.numel(),",
    ),
    # checkpoints
    Mutant(
        "a resumed training repeats its last step",
        "checkpoints",
        "loading/batch_loader.py",
        "self._position = (epoch, step + 1)",
        "self._position = (epoch, step)",
    ),
    Mutant(
        "a checkpoint is restored without the optimizer's state",
        "checkpoints",
        "training/train_state.py",
        '_load_optimizer(self.optimizer, state["optimizer"])',
        "pass",
    ),
    # caches and tiers
    Mutant(
        "one row too many is taken for cached",
        "caches",
        "features/cache.py",
        "out[i] = ids[i] + (hot[low] if ids[i] - starts[low] < cached[low] else cold[low])",
        "out[i] = ids[i] + (hot[low] if ids[i] - starts[low] <= cached[low] else cold[low])",
    ),
    Mutant(
        "int8 rows are multiplied by the scales of other rows",
        "caches",
        "features/sources.py",
        "scales = self._scales[ids - self._first]",
        "scales = self._scales[(ids - self._first)[::-1]]",
    ),
    # pipeline
    Mutant(
        "a thread makes the steps of another one",
        "pipeline",
        "loading/pipeline.py",
        "worker.place += len(self._workers)",
        "worker.place += 1",
    ),
    Mutant(
        "a closed pipeline does not make what it has permitted",
        "pipeline",
        "loading/pipeline.py",
        "            while worker.place >= self._num_permitted:\n                if self._closed or",
        "            while worker.place >= self._num_permitted or self._closed:\n                if self._closed or",
    ),
    # inference, embeddings
    Mutant(
        "the gradient of owned rows is that of all ranks together",
        "embeddings",
        "nn/owned_embedding.py",
        "values = g / ctx.mesh.size",
        "values = g",
    ),
    Mutant(
        "inference writes the rows of a chunk over the first ones",
        "inference",
        "inference/layerwise.py",
        "write_rows(array, ids - local.first, out)\n        return rows",
        "write_rows(array, np.arange(ids.size), out)\n        return rows",
    ),
    Mutant(
        "every rank scores all pairs",
        "inference",
        "inference/evaluate_links.py",
        "yield np.arange(first + rank, min(first + size, self.num_pairs), num_ranks)",
        "yield np.arange(first, min(first + size, self.num_pairs))",
    ),
]
