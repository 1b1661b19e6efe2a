"""Frames and chains of one tensor, under the lattice codec or another."""

from inshrink_core.chain import ChainConfig, ChainState, FramePlan, look_ahead
from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import FrameContext, TensorInput, make_codec
from inshrink_core.codecs.lattice.codec import LatticeCodec
from tests.strategies import normal, spec_of

CODEC = LatticeCodec()


ROLES = {
    "gradient": TensorRole.EXP_AVG,
    "second_moment": TensorRole.EXP_AVG_SQ,
    "momentum": TensorRole.MOMENTUM,
}


def item_of(spec, tensor, **beside):
    """Return a tensor with auxiliary tensors by the names of `ROLES`, and what else it comes with."""
    auxiliaries = {role: beside.pop(name, None) for name, role in ROLES.items()}
    return TensorInput(spec=spec, tensor=tensor, auxiliaries=auxiliaries, **beside)


def frame(tensor, config=None, reference=None, *, context=None, spec=None, **beside):
    """Encode a frame of one tensor; return what encode returns and the plan."""
    config = config or LatticeCodec()
    spec = spec or spec_of(tensor, "layer.weight")
    item = item_of(spec, tensor, **beside)
    plan = config.plan([spec], [config.observe(item, reference)], context)
    return config.encode(item, plan, reference), plan


def encode(tensor, codec, reference=None, **beside):
    """Return what a codec makes of a frame of one tensor."""
    return frame(tensor, codec, reference, **beside)[0]


def chain(tensors, config=None, rate=1e-3, second_moment=None):
    """Encode frames the way a chain does, memory included; return (blocks, last reference, plans)."""
    memory, reference, blocks, plans = None, None, [], []
    for tensor in tensors:
        rates = {"layer.weight": rate} if rate else {}
        context = FrameContext(learning_rates=rates, memory=memory)
        (block, reference), plan = frame(
            tensor, config, reference, context=context, second_moment=second_moment
        )
        memory = CODEC.remember(plan)
        blocks.append(block)
        plans.append(plan)
    return blocks, reference, plans


def encode_run(run, *, ahead=True, **settings):
    """Encode a run as a chain does; return the plan and the results by key of every frame."""
    config = ChainConfig(config=make_codec("lattice", settings), optimizer="drop")
    memory = look_ahead(config, run.steps, run.__getitem__) if ahead else None
    references, frames = {}, []
    for step in run.steps:
        state = ChainState(references=references, memory=memory)
        plan = FramePlan(config, run[step], state, run[step].specs)
        results = {result.spec.key: result for result in plan.encode(run[step].specs)}
        memory, references = plan.memory, {key: result.reference for key, result in results.items()}
        frames.append((plan, results))
    return frames


def moving(n_frames, shape=(100, 120), pace=1e-3):
    """Return weights on a random walk."""
    weights, frames = normal(shape, 0), []
    for t in range(n_frames):
        frames.append(weights)
        weights = weights + normal(shape, 10 + t, scale=pace)
    return frames
