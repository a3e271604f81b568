"""LogitsPipe and its parts. They stay in this module (`Op` and `CompileError` are other things at the top level)."""

from kernelmux.dispatch.logits_processor.compiler import CompileError as CompileError
from kernelmux.dispatch.logits_processor.compiler import Compiler as Compiler
from kernelmux.dispatch.logits_processor.compiler import FusionRule as FusionRule
from kernelmux.dispatch.logits_processor.compiler import compile_pipeline as compile_pipeline
from kernelmux.dispatch.logits_processor.operators import Op as Op
from kernelmux.dispatch.logits_processor.operators import ParameterizedOp as ParameterizedOp
from kernelmux.dispatch.logits_processor.pipe import LogitsPipe as LogitsPipe
from kernelmux.dispatch.logits_processor.processors import LegalizationError as LegalizationError
from kernelmux.dispatch.logits_processor.processors import LogitsProcessor as LogitsProcessor
from kernelmux.dispatch.logits_processor.processors import MinP as MinP
from kernelmux.dispatch.logits_processor.processors import Sample as Sample
from kernelmux.dispatch.logits_processor.processors import Softmax as Softmax
from kernelmux.dispatch.logits_processor.processors import Temperature as Temperature
from kernelmux.dispatch.logits_processor.processors import TopK as TopK
from kernelmux.dispatch.logits_processor.processors import TopP as TopP
from kernelmux.dispatch.logits_processor.processors import legalize_processors as legalize_processors
from kernelmux.dispatch.logits_processor.tagged import TaggedTensor as TaggedTensor
from kernelmux.dispatch.logits_processor.tagged import TensorType as TensorType
