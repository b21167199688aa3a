"""Problems (generated or read), their prompts, and a small tokenizer. Loads no framework."""

from workflow.data.errors import DataError, RowError
from workflow.data.functions import UserFunction, UserFunctionError
from workflow.data.problems import Problem, load_problems
from workflow.data.prompt import PromptEncoder, PromptError, demonstration, render_prompt, tokenizer_texts
from workflow.data.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_tokenizer
from workflow.data.verify import Verifier

__all__ = [
    "CHAT_TEMPLATE",
    "DataError",
    "Problem",
    "PromptEncoder",
    "PromptError",
    "RowError",
    "UserFunction",
    "UserFunctionError",
    "Verifier",
    "demonstration",
    "load_problems",
    "render_prompt",
    "save_tokenizer",
    "tokenizer_texts",
    "train_tokenizer",
]
