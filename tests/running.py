"""Engines over tiny models, for tests."""

from functools import partial

from specdec.engine import Engine
from specdec.postprocess import postprocess
from specdec.propose.none import none
from specdec.schedule import Limits, Request, schedule
from specdec.step import Stages
from specdec.verify.rejection import rejection


def tiny_engine(
    target,
    draft=None,
    propose=none,
    verify=rejection,
    *,
    k=3,
    draft_sampling="greedy",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    block_size=4,
    num_blocks=400,
    eos=(2,),
    kernels="torch",
    graphs=False,
    overlap=False,
    penalties=False,
    **keywords,
):
    """`propose` is bound with K = k and `draft_sampling`; other keywords go to it too."""
    stages = Stages(
        schedule=partial(
            schedule,
            num_draft_tokens=k,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        verify=verify,
        postprocess=postprocess,
        propose=partial(propose, draft_sampling=draft_sampling, **keywords),
    )
    limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_blocks, k)
    return Engine(
        target,
        draft,
        stages,
        limits,
        eos_token_ids=eos,
        draft_sampling=draft_sampling,
        penalties=penalties,
        kernels=kernels,
        graphs=graphs,
        overlap=overlap,
    )


def requests(prompts, **keywords):
    return [Request(tuple(prompt), **keywords) for prompt in prompts]
