"""Pages of results in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.lab.markdown import markdown_table

Document = Mapping[str, Any]


def page(document: Document, figures: Sequence[str], others: Sequence[str] = ()) -> str:
    """The page of a recipe.

    Args:
        document: see ``document.py``.
        figures: files beside the page.
        others: subjects in whose folders there is a page of the same recipe.
    """
    lossy = document["about"].get("lossy", {})
    lines = [
        f"# {document['title']}",
        "",
        f"{document['source']}. {document['claim']}",
        "",
        f"**{sentence(_verdict(document))}.** {sentence(document['reason'])}.",
        "",
    ]
    if others:
        links = ", ".join(f"[{name}]({name}/{document['name']}.md)" for name in others)
        lines += [f"On {document['about']['subject']}. On another subject: {links}.", ""]
    if lossy:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(lossy.values()))
        lines += [f"Lossy: outputs of {names} do not have the target's distribution.", ""]
    for each in document.get("shortfalls", ()):  # documents of older runs have none
        lines += [f"- {sentence(marked(each, lossy))}."]
    if document.get("shortfalls"):
        lines += [""]
    if document["effects"]:
        lines += _effects(document["effects"], document["about"]["size"] == "quick", lossy)
    for file, figure in zip(figures, document["figures"], strict=True):
        lines += [f"![{figure['title']}]({file})", ""]
    for table in document["tables"]:
        lines += _table(table, lossy)
    for note in document["notes"]:
        lines += [note, ""]
    lines += _about(document)
    return "\n".join(lines).rstrip() + "\n"


def marked(text: str, lossy: Iterable[str]) -> str:
    """A text with the name of a lossy method at its start marked as one."""
    for name in lossy:
        if text == name or text.startswith((f"{name} ", f"{name},", f"{name}:")):
            return f"{name} (lossy){text.removeprefix(name)}"
    return text


def index_page(
    documents: Mapping[str, Document], subject: str = "", others: Sequence[str] = ()
) -> str:
    """The list of all recipes; those that have not been run have no verdict.

    Args:
        documents: the results by recipe.
        subject: that was chosen for all of them, whose list has these results alone; empty for the
            list of all recipes, whose subjects differ.
        others: subjects whose lists are in folders of their names.
    """
    from recipes.reproduce.catalogue import RECIPES

    lines = [
        "# Published results, reproduced",
        "",
        "Each line is a table or figure of a paper, and whether it holds here: *reproduced in "
        "shape* where every effect has the paper's sign with an error probability of at most 5 %, "
        "*not reproduced* where one has not, *not testable here* where something is missing. "
        "Verdicts *by counts* are those of quick runs: tokens per target pass, α, perplexity, and "
        "speeds from counted passes; no time was measured. Sizes of effects depend on models and "
        "hardware and are on the pages.",
        "",
        "`make reproduce` runs all of them and goes on after any interruption; `python -m "
        "recipes.reproduce NAME` runs one, `--quick` small and without timing, `--paper-models` on "
        "the models of the paper. Machines differ, also in their instructions, so that each line "
        "says where it was measured.",
        "",
        "Seeds are hashes of the recipes' names, so that no result has a part in their choice. The "
        "tests of skewed values, the sizes of quick runs and the effects that these need not show "
        "were chosen after a look at results with other seeds. Greedy outputs have no seed: of "
        "effects at temperature 0, the test was chosen after a look at the same outputs, so their "
        "error probabilities are optimistic.",
        "",
    ]
    if others:
        links = ", ".join(f"[{name}]({name}/README.md)" for name in others)
        lines += [f"The same on a chosen subject (`--subject`): {links}.", ""]
    flag = f" --subject {subject}" if subject else ""
    rows = []
    for recipe in RECIPES:
        document = documents.get(recipe.name)
        if document is None and subject:
            continue
        title, verdict, about, machine = recipe.title, "not run yet", "", ""
        if document is not None:
            title = f"[{recipe.title}]({recipe.name}.md)"
            verdict = _verdict(document)
            about = f"{document['about']['subject']}, {document['about']['size']}"
            machine = machine_of(document["about"])
        command = f"`python -m recipes.reproduce {recipe.name}{flag}`"
        rows.append((title, recipe.source, verdict, about, machine, command))
    heads = ("result", "source", "verdict", "measured on", "machine", "command")
    return "\n".join([*lines, *markdown_table(heads, rows, left=len(heads))]) + "\n"


def machine_of(about: Mapping[str, Any]) -> str:
    """The processor or GPU, and the instruction sets, which processors of one name may differ in.
    Documents of older runs lack these."""
    sets = about.get("instructions")
    return f"{about['hardware']} ({sets})" if sets else str(about["hardware"])


def _verdict(document: Document) -> str:
    quick = document["about"]["size"] == "quick" and document["verdict"] != "not testable here"
    return f"{document['verdict']}{', by counts' if quick else ''}"


def sentence(text: str) -> str:
    """A text with a capital at its start; Greek letters are symbols and stay."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _effects(effects: Sequence[Mapping[str, Any]], quick: bool, lossy: Iterable[str]) -> list[str]:
    rows = []
    for each in effects:
        signs = f"{each['wins']} : {each['losses']}" if each["wins"] or each["losses"] else ""
        error = f"{each['error']:.2g}" if each["interval"] else "exact"
        rows.append((each["claim"], each["outcome"], each["size"], each["interval"], signs, error))
    head = ("effect", "outcome", "size", "95 % interval", "outputs for : against", "error")
    lines = _table({"title": "Effects", "head": head, "rows": rows}, lossy)
    for each in effects:
        if each["expected"] and (quick or each["outcome"] != "shown"):
            about = "Not required of the quick run" if quick else sentence(each["outcome"])
            lines += [
                f"{about}: {each['claim']}. Why it may be missing, as a guess that was not tested: "
                f"{each['expected']}.",
                "",
            ]
    return lines


def _table(table: Mapping[str, Any], lossy: Iterable[str]) -> list[str]:
    head = [marked(each, lossy) for each in table["head"]]
    rows = [[marked(first, lossy), *others] for first, *others in table["rows"]]
    return [f"## {table['title']}", "", *markdown_table(head, rows), ""]


def _about(document: Document) -> list[str]:
    about = document["about"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    timing = (
        "Times were measured."
        if about["size"] == "full"
        else "Times were not measured: a speed counts a target pass as 1, and a draft pass as the "
        "ratio of the weights that it reads."
    )
    return [
        "## How it was measured",
        "",
        f"{about['date']}, {machine_of(about)}, threads: {about['threads']}; {versions}. "
        f"{sentence(about['subject'])}, {about['size']} size: {about['prompts']} prompts of each "
        f"kind, {about['tokens']} tokens, {about['repeats']} seeds unless a table says otherwise. "
        f"{timing}{_steadiness(about)}",
        "",
        "Error: the probability of a result at least this clear if there were no effect, by the "
        "sign test over outputs, or by the bootstrap where no signs are counted.",
        "",
        f"Command: `{about['command']}`",
    ]


def _steadiness(about: Mapping[str, Any]) -> str:
    """How many speed-ups are uncertain; documents of older runs do not say."""
    if "speedups" not in about:
        return ""
    return (
        f" Of {about['speedups']} speed-ups, {about['unsteady']} may differ by more than 5 % in "
        "another run."
    )
