"""D18: clear_session resets the global dtype policy."""

from keras.src.backend.common import global_state

from tfopt.repairs.repair import Function, Repair

_CLEAR = "keras.src.backend.common.global_state:clear_session"


def _keeping_the_policy(original: Function) -> Function:
    def clear_session(free_memory: bool = True) -> None:
        policy = global_state.get_global_attribute("dtype_policy")
        original(free_memory)
        global_state.set_global_attribute("dtype_policy", policy)

    return clear_session


CLEAR_SESSION = Repair(
    name="clear_session",
    defect="clear_session drops the global dtype policy: models created afterwards compute in float32.",
    reference="Keras, clear_session in keras/src/backend/common/global_state.py; no upstream report was found.",
    broken={_CLEAR: frozenset({"50df48c29bd60095"})},
    replace={_CLEAR: _keeping_the_policy},
    without="Set the policy again after each clear_session.",
)
