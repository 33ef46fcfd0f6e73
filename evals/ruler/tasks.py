"""The 13 tasks of RULER: their parameters, prompts, and how much of the length is reserved for the answer."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """Tasks that share a template.

    Attributes:
        name: niah, vt, cwe, fwe or qa.
        template: the prompt; `{context}` and `{query}` at least.
        answer_prefix: what the answer starts with; the model continues it.
        new_tokens: reserved for the answer; they count towards the length.
        question: how the part of the prompt starts that is not known while the context is compressed.
        match: "all", the share of the references that are found, or "any" of them.
    """

    name: str
    template: str
    answer_prefix: str
    new_tokens: int
    question: str
    match: str = "all"

    @property
    def prompt(self) -> str:
        return self.template + self.answer_prefix


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: a family and its parameters."""

    name: str
    family: Family
    parameters: Mapping[str, Any]

    @property
    def new_tokens(self) -> int:
        return self.family.new_tokens


NIAH = Family(
    "niah",
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
    " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    new_tokens=128, question="\nWhat ",
)
VT = Family(
    "vt",
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are "
    "assigned the value {query}, they are: ",
    new_tokens=30, question="\nQuestion: ",
)
CWE = Family(
    "cwe",
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    new_tokens=120, question="\nQuestion: ",
)
FWE = Family(
    "fwe",
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    new_tokens=50, question="\nQuestion: ",
)
QA = Family(
    "qa",
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\n"
    "Question: {query}",
    " Answer:",
    new_tokens=32, question="\n\nQuestion: ", match="any",
)


def _niah(name: str, haystack: str, key: str = "words", value: str = "numbers", k: int = 1, v: int = 1,
          q: int = 1):
    return Task(name, NIAH, MappingProxyType(
        {"haystack": haystack, "key": key, "value": value, "keys": max(k, q), "values": v, "queries": q}
    ))


TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in (
    _niah("niah_single_1", "noise"),
    _niah("niah_single_2", "essay"),
    _niah("niah_single_3", "essay", value="uuids"),
    _niah("niah_multikey_1", "essay", k=4),
    _niah("niah_multikey_2", "needle"),
    _niah("niah_multikey_3", "needle", key="uuids", value="uuids"),
    _niah("niah_multivalue", "essay", v=4),
    _niah("niah_multiquery", "essay", q=4),
    Task("vt", VT, MappingProxyType({"chains": 1, "hops": 4})),
    Task("cwe", CWE, MappingProxyType({"common": 10, "common_repeats": 30, "uncommon_repeats": 3})),
    Task("fwe", FWE, MappingProxyType({"alpha": 2.0, "word_length": 6})),
    Task("qa_1", QA, MappingProxyType({"dataset": "squad"})),
    Task("qa_2", QA, MappingProxyType({"dataset": "hotpotqa"})),
)})

RULER_6 = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue",
    "niah_multiquery",
)
"""The tasks that a small model can do at all: their mean is `ruler-6`."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "all": tuple(TASKS),
    "ruler-11": tuple(name for name, task in TASKS.items() if task.family is not QA),
    "ruler-6": RULER_6,
})
"""Names that stand for several tasks; `ruler-11` are those that need no question-answering data."""


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the nearest name is given.
    """
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, list(TASKS), n=1, cutoff=0.4)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown RULER task {name!r}{hint}; tasks: {', '.join(TASKS)}; groups: "
                     f"{', '.join(GROUPS)}")


def expand_tasks(names: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Task names with the groups among them spelled out, each task once.

    Raises:
        ValueError: a name is neither a task nor a group.
    """
    expanded = [member for name in names for member in GROUPS.get(name, (name,))]
    return tuple(dict.fromkeys(find_task(name).name for name in expanded))
