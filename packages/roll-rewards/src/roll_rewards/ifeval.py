"""`reward: ifeval`: verifiable instructions of IFEval (2311.07911), by their ids, and of RLVR-IFeval, by `func_name`.

Rows have the columns of IFEval, `instruction_id_list` and `kwargs`, or the JSON of RLVR-IFeval (Tulu 3, 2411.15124) in
`ground_truth`, which ROLL uses too.

These are the definitions of IFEval's *strict* accuracy, of the response as it is. They differ from its code here:

* Sentences end at `.`, `!` or `?` before a blank; IFEval uses nltk's model for English.
* `change_case` does not detect the language.
* A postscript, a placeholder and a highlight are not empty, and an empty response follows nothing.
"""

from __future__ import annotations

import json
import operator
import re
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.reasoning import answer_of, opens_reasoning
from roll_core.errors import DataError, RewardFailure, install_command
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_rewards.answers import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_core.spec.rollout import RewardRequest
    from roll_rewards.config import IFEvalConfig


class IFEvalReward(RewardFunction):
    """1 if every instruction is followed, or the share of instructions that are."""

    config: IFEvalConfig

    @override
    def score(self, request: RewardRequest) -> Reward:
        instructions = instructions_of(self.config, request.metadata, f"sample {request.sample.id}")
        text: str | None = request.response
        if self.config.remove_reasoning:
            text = answer_of(request.response, opened=opens_reasoning(request.prompt))
        if text is None:
            return Reward(value=0.0, detail={"followed": 0.0, "why": NO_ANSWER})
        followed = [follows(text, name, options) for name, options in instructions]
        share = sum(followed) / len(followed)
        detail: dict[str, float | str] = {"followed": share}
        if not all(followed):
            detail["not_followed"] = next(
                name for (name, _), yes in zip(instructions, followed, strict=True) if not yes
            )
        return Reward(value=share if self.config.reward_type == "soft" else float(all(followed)), detail=detail)

    @override
    def unscorable(self, row: Mapping[str, Any]) -> str:
        try:
            for name, options in instructions_of(self.config, row, "the row"):
                follows("a response", name, options)
        except (DataError, RewardFailure) as problem:
            return str(problem)
        return ""


def instructions_of(config: IFEvalConfig, row: Mapping[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """Ids and arguments of a row's instructions. Raises `DataError` if they cannot be used."""
    if config.instructions in row:
        names, options = _plain(row[config.instructions]), _plain(row.get(config.instruction_args))
        options = options or [{} for _ in names]
        if not isinstance(names, list) or not names or not isinstance(options, list) or len(names) != len(options):
            raise DataError(
                f"{where}: columns {config.instructions!r} and {config.instruction_args!r}, expected two lists of"
                " equal length"
            )
        instructions = [(str(name), dict(arguments or {})) for name, arguments in zip(names, options, strict=True)]
    elif config.ground_truth in row:
        instructions = [_of_rlvr(_plain(row[config.ground_truth]), where)]
    else:
        raise DataError(
            f"{where}: no column {config.instructions!r} or {config.ground_truth!r} (the row's columns:"
            f" {', '.join(sorted(row)) or 'none'})"
        )
    unknown = [name for name, _ in instructions if name not in CHECKS]
    if unknown:
        raise DataError(f"{where}: unknown instruction {unknown[0]!r}, expected one of {', '.join(sorted(CHECKS))}")
    return instructions


def follows(text: str, name: str, options: Mapping[str, Any]) -> bool:
    """True if a text follows an instruction. An empty text follows none. Raises `DataError` for wrong options."""
    if not text.strip():
        return False
    arguments = {key: value for key, value in options.items() if value is not None}
    try:
        return CHECKS[name](text, arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"instruction {name}: its arguments {arguments!r:.200} cannot be used: {error!r}") from error


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


# -- instructions ------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Words, as IFEval counts them: runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> list[str]:
    """Sentences: text up to `.`, `!` or `?` before a blank or the end."""
    return [sentence for sentence in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()) if re.search(r"\w", sentence)]


def _compare(count: int, options: Mapping[str, Any], number: str, relation: str = "relation") -> bool:
    expected, how = int(options[number]), options.get(relation) or "at least"
    if how == "around":
        return abs(count - expected) <= int(options.get("slack", max(round(expected * 0.1), 1)))
    if how not in RELATIONS:
        raise ValueError(f"{relation} {how!r}, expected around or one of {', '.join(RELATIONS)}")
    return RELATIONS[how](count, expected)


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "exactly": operator.eq,
}
"""The first two are IFEval's; RLVR-IFeval has the others, and `around`."""


def _count(keyword: str, text: str, *, whole_words: bool = False) -> int:
    pattern = re.escape(keyword)
    return len(re.findall(rf"(?<!\w){pattern}(?!\w)" if whole_words else pattern, text, re.IGNORECASE))


def _frequency(text: str, options: Mapping[str, Any]) -> bool:
    count = _count(str(options["keyword"]), text, whole_words=options.get("whole_words", False))
    return _compare(count, options, "frequency")


def _no_forbidden_word(text: str, options: Mapping[str, Any]) -> bool:
    whole_words = options.get("whole_words", True)
    return not any(_count(word, text, whole_words=whole_words) for word in options["forbidden_words"])


def _num_words(text: str, options: Mapping[str, Any]) -> bool:
    counted = text.split() if options.get("at_blanks") else words(text)
    return _compare(len(counted), options, "num_words")


def _paragraphs(text: str, separator: str) -> list[str] | None:
    """Paragraphs; None if one between others is empty. IFEval ignores empty ones at the ends."""
    parts = [part.strip() for part in re.split(separator, text)]
    if any(not part for part in parts[1:-1]):
        return None
    return [part for part in parts if part]


def _num_paragraphs(text: str, options: Mapping[str, Any]) -> bool:
    paragraphs = _paragraphs(text, rf"\s?{re.escape(options.get('divider', '***'))}\s?")
    return paragraphs is not None and len(paragraphs) == int(options["num_paragraphs"])


def _nth_first_word(text: str, options: Mapping[str, Any]) -> bool:
    paragraphs = [paragraph for paragraph in re.split(r"\n\n", text) if paragraph.strip()]
    nth, first = int(options["nth_paragraph"]), str(options["first_word"]).lower()
    if not 1 <= nth <= len(paragraphs) or len(paragraphs) != int(options.get("num_paragraphs", len(paragraphs))):
        return False
    start = paragraphs[nth - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", start)[0].lower() == first


def _letters(text: str, options: Mapping[str, Any]) -> bool:
    letter = str(options["letter"])
    count = text.count(letter) if options.get("match_case") else text.lower().count(letter.lower())
    return _compare(count, options, "let_frequency", "let_relation")


def _capital_words(text: str, options: Mapping[str, Any]) -> bool:
    count = sum(word.isupper() for word in re.findall(r"\w+(?:[-./]\w+)*", text))  # U.S. and AI-DRIVEN are one word
    return _compare(count, options, "capital_frequency", "capital_relation")


def _postscript(text: str, options: Mapping[str, Any]) -> bool:
    marker = str(options.get("postscript_marker") or "P.S.").strip()
    pattern = re.escape(marker)
    if marker in ("P.S.", "P.P.S"):
        pattern = pattern.replace(r"\.", r"\.\s?").removesuffix(r"\s?")
    return re.search(rf"{pattern}\s*\S", text, re.IGNORECASE) is not None


def _highlights(text: str, options: Mapping[str, Any]) -> bool:
    highlights = re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*", text)
    return sum(bool(highlight.strip("*").strip()) for highlight in highlights) >= int(options["num_highlights"])


def _sections(text: str, options: Mapping[str, Any]) -> bool:
    splitter = str(options["section_spliter"])  # IFEval's spelling
    return len(re.split(rf"\s?{re.escape(splitter)}\s?\d+\s?", text)) - 1 >= int(options["num_sections"])


def _title(text: str, options: Mapping[str, Any]) -> bool:
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("<> \t") for line in text.split("\n"))


def _is_json(text: str, options: Mapping[str, Any]) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).removesuffix("```"))
    except (ValueError, RecursionError):
        return False
    return True


def _constrained(text: str, options: Mapping[str, Any]) -> bool:
    allowed = options.get("options") or ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    return any(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text) for option in allowed)


def _two_responses(text: str, options: Mapping[str, Any]) -> bool:
    responses = _paragraphs(text, r"\*{6}")
    return responses is not None and len(responses) == 2 and responses[0] != responses[1]


def _language(text: str, options: Mapping[str, Any]) -> bool:
    try:
        import langdetect  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise RewardFailure(f"instruction language:response_language needs: {install_command('langdetect')}") from error
    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == options["language"])
    except langdetect.LangDetectException:  # no letters
        return False


def _ends_with(text: str, options: Mapping[str, Any]) -> bool:
    return text.strip().strip('"').lower().endswith(str(options["end_phrase"]).strip().lower())


def _starts_with(text: str, options: Mapping[str, Any]) -> bool:
    return text.strip().lower().startswith(str(options["prompt_to_repeat"]).strip().lower())


def _quoted(text: str, options: Mapping[str, Any]) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "keywords:existence": lambda text, o: all(_count(keyword, text) for keyword in o["keywords"]),
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _no_forbidden_word,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": lambda text, o: _compare(len(sentences(text)), o, "num_sentences"),
    "length_constraints:number_paragraphs": _num_paragraphs,
    "length_constraints:number_words": _num_words,
    "length_constraints:nth_paragraph_first_word": _nth_first_word,
    "detectable_content:number_placeholders": lambda text, o: (
        len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(o["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, o: (
        len(re.findall(r"^[ \t]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == int(o["num_bullets"])
    ),
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _starts_with,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text, o: text.isupper(),
    "change_case:english_lowercase": lambda text, o: text.islower(),
    "punctuation:no_comma": lambda text, o: "," not in text,
}
"""Instructions by IFEval's ids."""

RLVR: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"letter": "letter", "N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {"language": "language"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "first_word": "first_word", "i": "nth_paragraph"},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""RLVR-IFeval's functions: the id, and the names of its arguments there and here."""

RLVR_OPTIONS: dict[str, dict[str, Any]] = {
    "verify_keyword_frequency": {"relation": "exactly", "whole_words": True},
    "validate_forbidden_words": {"whole_words": False},
    "verify_letter_frequency": {"let_relation": "exactly", "match_case": True},
    "verify_paragraph_count": {"divider": "* * *"},
    "validate_word_constraint": {"at_blanks": True},
    "verify_sentence_constraint": {"slack": 1},
}
"""How the same instructions are defined there: open-instruct's `if_functions.py`."""


def _of_rlvr(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    name = value.get("func_name") if isinstance(value, dict) else None
    if name not in RLVR:
        raise DataError(
            f"{where}: {str(value)[:100]!r}, expected a JSON object with func_name, one of {', '.join(RLVR)}"
        )
    id, names = RLVR[name]
    options = {ours: value[theirs] for theirs, ours in names.items() if value.get(theirs) is not None}
    if isinstance(options.get("options"), str):
        options["options"] = [option.strip() for option in re.split(r"/|,| or ", options["options"]) if option.strip()]
    return id, options | RLVR_OPTIONS.get(name, {})
