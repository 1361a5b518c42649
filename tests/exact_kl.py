"""The gradient of the KL of one small distribution to another, exactly and by verl's estimators, for both versions."""

import torch


def gradients(kl_penalty, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for the logits, and the largest difference of the estimator's values from k3's.

    The first is of KL(p || q) itself, the second the mean over samples of ``kl_penalty``, verl's function, of ``kind``:
    each token weighed with its probability, which no gradient flows through, as a batch of samples would.
    """
    torch.manual_seed(0)
    logits, reference = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    values = kl_penalty(log_p, log_q, kind)
    (estimated,) = torch.autograd.grad((log_p.exp().detach() * values).sum(), logits)
    k3 = (log_q - log_p).exp() - (log_q - log_p) - 1
    return exact, estimated, (values - k3).abs().max()
