# SPDX-License-Identifier: Apache-2.0
"""PyTorch layers that `distmoe bench --peers` times in the same rounds as its own calls.

The command starts this text with a Python that may have PyTorch and talks to it in JSON, one object
a line: {"do": "layer", ...} makes random tensors of a row and answers {"ok": true}; {"do": "time",
"row": i, "variant": name} answers {"us": microseconds}; what goes wrong answers {"error": why}.

    loop      an expert at a time: select its tokens, two products, add the weighted rows
    grouped   rows sorted by expert, the grouped product of PyTorch, a weighted gather; no waiting
              for the device
    compiled  torch.compile of grouped; on GPUs
"""
import json
import sys
import time

import torch
import torch.nn.functional as F

MAX_ROWS = 64 * 64  # shapes and numbers of tokens of a run


def experts_loop(x, ids, scores, w13, w2):
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, k = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        gate, up = (x[token] @ w13[expert].T).chunk(2, -1)
        rows = (F.silu(gate) * up) @ w2[expert].T
        y = y.index_add(0, token, rows.float() * scores[token, k, None])
    return y.to(x.dtype)


class GatherRows(torch.autograd.Function):
    """x[token_of_row], whose backward gathers too."""

    @staticmethod
    def forward(ctx, x, token_of_row, row_of_route, top_k):
        ctx.save_for_backward(row_of_route)
        ctx.top_k = top_k
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx, grad):
        (row_of_route,) = ctx.saved_tensors
        routes = grad.index_select(0, row_of_route).view(-1, ctx.top_k, grad.shape[1])
        return routes.sum(1), None, None, None


class CombineRows(torch.autograd.Function):
    """The weighted sum of every token's rows, in FP32."""

    @staticmethod
    def forward(ctx, rows, scores, route_of_row, token_of_row, row_of_route):
        ctx.save_for_backward(rows, scores, route_of_row, token_of_row, row_of_route)
        routes = rows.index_select(0, row_of_route).view(*scores.shape, -1).float()
        return (routes * scores[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        rows, scores, route_of_row, token_of_row, row_of_route = ctx.saved_tensors
        dy = grad.index_select(0, token_of_row).float()
        grad_rows = (dy * scores.reshape(-1).index_select(0, route_of_row)[:, None]).to(rows.dtype)
        grad_scores = (dy * rows.float()).sum(-1).index_select(0, row_of_route).view_as(scores)
        return grad_rows, grad_scores, None, None, None


def experts_grouped(x, ids, scores, w13, w2):
    top_k = ids.shape[1]
    sorted_ids, route_of_row = torch.sort(ids.reshape(-1), stable=True)
    bounds = torch.arange(w13.shape[0], device=x.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, bounds, right=True).to(torch.int32)
    row_of_route = torch.empty_like(route_of_row)
    row_of_route.scatter_(0, route_of_row, torch.arange(ids.numel(), device=x.device))
    token_of_row = route_of_row // top_k
    rows = GatherRows.apply(x, token_of_row, row_of_route, top_k)
    gate, up = torch._grouped_mm(rows, w13.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    return CombineRows.apply(rows, scores, route_of_row, token_of_row, row_of_route)


class Layer:
    """The tensors of a row: sets of tokens with the row's own routes, which calls take in turn."""

    def __init__(self, request, device):
        d, f, e, k = request["shape"]
        t = request["tokens"]
        self.device = device
        self.trains = request["trains"]
        self.num_calls = 0

        def noise(*shape, scale=1.0):
            return torch.randn(shape, device=device).mul_(scale).bfloat16()

        self.w13 = torch.empty(e, 2 * f, d, device=device, dtype=torch.bfloat16)
        self.w2 = torch.empty(e, d, f, device=device, dtype=torch.bfloat16)
        for expert in range(e):
            self.w13[expert] = noise(2 * f, d, scale=d**-0.5)
            self.w2[expert] = noise(d, f, scale=f**-0.5)
        self.sets = []
        for routes in request["routes"]:
            ids = torch.tensor(routes["ids"], device=device).view(t, k)
            scores = torch.tensor(routes["scores"], device=device).view(t, k)
            self.sets.append((noise(t, d), ids, scores, noise(t, d)))
        for tensor in (self.w13, self.w2, *(s[0] for s in self.sets), *(s[2] for s in self.sets)):
            tensor.requires_grad_(self.trains)

    def call(self, function):
        x, ids, scores, dy = self.sets[self.num_calls % len(self.sets)]
        self.num_calls += 1
        if not self.trains:
            with torch.no_grad():
                function(x, ids, scores, self.w13, self.w2)
            return
        for tensor in (x, scores, self.w13, self.w2):
            tensor.grad = None
        function(x, ids, scores, self.w13, self.w2).backward(dy)

    def microseconds(self, function):
        if self.device == "cpu":
            begin = time.perf_counter()
            self.call(function)
            us = 1e6 * (time.perf_counter() - begin)
            # Threads of PyTorch that still spin would take part in the next measurement.
            time.sleep(0.02)
            return us
        # The call before hides what it costs the host to launch the timed one.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.call(function)
        begin.record()
        self.call(function)
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)


def main():
    device = sys.argv[1]
    if device == "cpu":
        torch.set_num_threads(int(sys.argv[2]))
    else:
        torch.cuda.set_device(int(sys.argv[2]))
    torch.manual_seed(0)
    functions = {"loop": experts_loop, "grouped": experts_grouped}
    if device == "cuda":
        # A function that was compiled for eight sizes runs as it is from the ninth on, without a
        # word: rows have as many sizes as they like.
        torch._dynamo.config.recompile_limit = MAX_ROWS
        torch._dynamo.config.accumulated_recompile_limit = MAX_ROWS
        functions["compiled"] = torch.compile(experts_grouped, dynamic=False)
    layers = {}

    def answer(**values):
        print(json.dumps(values), flush=True)

    answer(ok=True, version=torch.__version__, variants=list(functions))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "layer":
                layers[request["row"]] = Layer(request, device)
                answer(ok=True)
            else:
                layer = layers[request["row"]]
                answer(us=layer.microseconds(functions[request["variant"]]))
        except Exception as problem:  # whatever it is, the command says it
            answer(error=f"{type(problem).__name__}: {str(problem).splitlines()[0]}")


if __name__ == "__main__":
    main()
