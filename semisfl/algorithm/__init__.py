"""The parts of SemiSFL's Algorithm 1 that are no loop: losses, queue, teacher, controller, correction of labels.

Begin with `losses`: consistency (H, Eq. 1) and the contrastive loss (T and C, Eqs. 3 and 5) against the references
that `queue` holds. `teacher` is the moving average of a model, `schedule` the learning rate of a round, `controller`
the number of supervised steps. `labelling` and `membership` correct pseudo-labels by class, beyond the paper.

Nothing here knows a client, a file or a device: tensors in, tensors out. What must survive a restart has
``state_dict`` and ``load_state_dict``.
"""
