"""Muon: the optimizer of the projections. Embeddings, norms and layer scalars use AdamW."""
import torch


class Muon:
    """Momentum, orthogonalised by five Newton-Schulz steps.

    Every update is close to an orthogonal matrix, so all directions of a projection learn at the same speed, which
    makes the most of few steps. Matrices of one shape are handled as one batch, since the matrices are tiny.
    """

    # coefficients of the usual quintic iteration, which pushes all singular values towards 1
    A, B, C = 3.4445, -4.7750, 2.0315

    def __init__(self, parameters, beta=.95, decay=.01):
        self.beta = beta
        self.decay = decay
        self.groups = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.momentum = {shape: torch.zeros(len(members), *shape) for shape, members in self.groups.items()}

    def orthogonalise(self, u):
        """u [n, out, in] with singular values near 1."""
        tall = u.shape[1] > u.shape[2]
        if tall:  # the products below are then as small as possible
            u = u.transpose(1, 2)
        u = u / (u.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = u @ u.transpose(1, 2)
            u = self.A * u + (self.B * gram + self.C * gram @ gram) @ u
        return u.transpose(1, 2) if tall else u

    @torch.no_grad()
    def step(self, rate):
        """One update. Parameters without a gradient, those of a skipped layer, keep their momentum and value."""
        for shape, members in self.groups.items():
            live = [i for i, parameter in enumerate(members) if parameter.grad is not None]
            if not live:
                continue
            gradient = torch.stack([members[i].grad for i in live])
            momentum = self.momentum[shape][live].lerp_(gradient, 1 - self.beta)
            self.momentum[shape][live] = momentum
            update = self.orthogonalise(gradient.lerp(momentum, self.beta))
            scale = max(1, shape[0] / shape[1]) ** .5
            for row, i in enumerate(live):
                members[i].mul_(1 - rate * self.decay).add_(update[row], alpha=-rate * scale)
