"""``outrider analyse``: predictions from values, and measured cells against their prediction."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.errors import fail
from outrider.cli.options.analysis import Values
from outrider.cli.options.output import OUTPUT, AsJson
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.lab.analysis.prediction import Factors

_CELLS = "Measured cells"
_LEVIATHAN = ("leviathan-2", "leviathan-3")
_PREDICTION = "prediction"
_PICTURES = (".svg", ".png")
_REFERENCE = ("alpha", "gamma", "dependence", "c", "beta", "overhead")


def analyse(
    *,
    values: Values,
    cells: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare prediction and measurement of the cells in this cells.jsonl, or in the "
            "folder of outrider bench that holds one.",
            rich_help_panel=_CELLS,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=X",
            help="What the cells are compared with, such as alpha=0.75,gamma=7,c=0.02; also "
            "dependence, beta and overhead. Default: the limit of γ + 1 tokens per round at no "
            "cost.",
            rich_help_panel=_CELLS,
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Draw leviathan-2, leviathan-3, or, with --cells, prediction.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The .svg or .png for --figure.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute what theory predicts, and why a measured speed-up falls short of it.

    Expected tokens per round, speed-up and the best draft length from values:

      outrider analyse --alpha 0.8 --cost 0.1 --gamma 4

    Measured cells against the prediction, with what each factor costs (α, dependence between
    positions, c, β, overhead):

      outrider analyse --cells results/ --reference alpha=0.75,gamma=7,c=0.02

    Figures 2 and 3 of Leviathan et al. (2023), drawn from their formulas:

      outrider analyse --figure leviathan-2 -o figure-2.svg

    docs/analysis.md lists the formulas with their units and sources.
    """
    known = (values.alpha, values.acceptance_rate, values.acceptance_length)
    given = sum(each is not None for each in known)
    if given > 1:
        raise fail(
            "--alpha, --acceptance-rate and --acceptance-length all determine α: pass one of them"
        )
    if not given and cells is None and figure is None:
        raise fail("nothing to analyse: pass --alpha, --cells or --figure (help: --help)")
    if given and values.gamma is None and values.alpha is None:
        raise fail("--gamma N is needed to compute α from an acceptance rate or length")
    if reference is not None and cells is None:
        raise fail("--reference is what --cells FILE is compared with: pass both")
    _check_figure(figure, output, cells)
    start("outrider.lab.bench" if cells else "outrider.lab.analysis.prediction")
    found: dict[str, Any] = {}
    if given:
        found["values"] = _of_values(values)
    if cells is not None:
        found["cells"] = _of_cells(cells, _parsed(reference), figure, output)
    if figure in _LEVIATHAN:
        _draw(figure, output)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    elif found:
        from outrider.cli.analyse_table import show

        show(found)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)


def _check_figure(figure: str | None, output: Path | None, cells: Path | None) -> None:
    """Fails, before any work, if the figure cannot be drawn."""
    if (figure is None) != (output is None):
        raise fail("--figure NAME and -o FILE belong together: pass both")
    if figure is None or output is None:
        return
    if figure not in (*_LEVIATHAN, _PREDICTION):
        known = ", ".join((*_LEVIATHAN, _PREDICTION))
        raise fail(f"--figure {figure}: must be one of {known}")
    if figure == _PREDICTION and cells is None:
        raise fail(f"--figure {figure}: needs measured cells: pass --cells FILE")
    if output.suffix not in _PICTURES:
        raise fail(f"--output {output}: must end in {' or '.join(_PICTURES)}")
    if not output.absolute().parent.is_dir():
        raise fail(f"--output {output}: there is no folder {output.parent}")


def _of_values(values: Values) -> dict[str, Any]:
    """What follows from the values, as JSON."""
    from outrider.lab.analysis import acceptance, speedup
    from outrider.lab.analysis import tokens_per_round as per_round

    alpha, gamma, c, beta = _alpha(values), values.gamma, values.cost, values.beta
    best = speedup.optimal_gamma(alpha, c, lambda tokens: beta)
    found: dict[str, Any] = {
        "alpha": alpha,
        "c": c,
        "beta": beta,
        "worthwhile": speedup.is_worthwhile(alpha, c),
        "optimal_gamma": best,
        "optimal_speedup": speedup.speedup(alpha, best, c, beta) if best else 1.0,
    }
    if gamma is None:
        return found
    rounds, variance = per_round.rounds_of_generation(alpha, gamma, values.tokens)
    found |= {
        "gamma": gamma,
        "expected_tokens": per_round.expected_tokens(alpha, gamma),
        "token_deviation": per_round.token_variance(alpha, gamma) ** 0.5,
        "acceptance_rate": acceptance.expected_acceptance_rate(alpha, gamma) if gamma else None,
        "speedup": speedup.speedup(alpha, gamma, c, beta),
        "largest_beta": speedup.largest_beta(alpha, gamma, c),
        "break_even_alpha": speedup.alpha_for_speedup(1.0, gamma, c, beta),
        "tokens": values.tokens,
        "rounds": rounds,
        "round_deviation": variance**0.5,
    }
    if values.operations is not None:
        found["operations_factor"] = speedup.operations_factor(alpha, gamma, values.operations)
    return found


def _alpha(values: Values) -> float:
    """α as given, or as it follows from an acceptance rate or length."""
    from outrider.lab.analysis.acceptance import alpha_of_rate
    from outrider.lab.analysis.speedup import alpha_of_tokens

    if values.alpha is not None:
        return values.alpha
    assert values.gamma is not None
    if values.acceptance_rate is not None:
        return alpha_of_rate(values.acceptance_rate, values.gamma)
    assert values.acceptance_length is not None
    return alpha_of_tokens(values.acceptance_length, values.gamma)


def _parsed(reference: str | None) -> "Factors | None":
    """The factors that ``NAME=X,NAME=X`` names."""
    from outrider.lab.analysis.prediction import Factors

    if reference is None:
        return None
    values: dict[str, float] = {}
    for part in reference.split(","):
        name, _, text = part.partition("=")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            raise fail(f"--reference {part!r}: must be NAME=NUMBER") from None
    unknown = [name for name in values if name not in _REFERENCE]
    if unknown or not {"alpha", "gamma"} <= values.keys():
        raise fail(
            f"--reference {reference}: must name alpha and gamma, and may name "
            f"{', '.join(_REFERENCE[2:])}"
        )
    return Factors(**values)


def _of_cells(
    path: Path, reference: "Factors | None", figure: str | None, output: Path | None
) -> list[dict[str, Any]]:
    """The prediction of each cell, as JSON."""
    from outrider.lab.analysis.acceptance import alpha_of_totals
    from outrider.lab.analysis.prediction import if_ideal
    from outrider.lab.bench import read_cells
    from outrider.lab.cell_view import views_of
    from outrider.lab.prediction import predictions_of

    predictions = predictions_of(views_of(read_cells(path)))
    if not predictions:
        raise fail(
            f"--cells {path}: no cell has both drafts and a measured baseline of its setting"
        )
    if figure == _PREDICTION:
        from outrider.lab.plots import require_matplotlib
        from outrider.lab.report.sweeps import prediction_chart

        require_matplotlib()
        assert output is not None
        _write(lambda: prediction_chart(predictions).save(output), output)
    found = []
    for each in predictions:
        cell, explained = each.cell, each.shortfall(reference)
        counted = alpha_of_totals(sum(cell.accepted_at), sum(cell.verified_at))
        found.append(
            {
                "method": cell.title,
                "gamma": cell.gamma,
                "lossless": cell.lossless,
                "data": cell.data,
                "temperature": cell.temperature,
                "batch_size": cell.batch_size,
                "speedup": each.measured,
                "prefill": each.prefill,
                "acceptance_rate": cell.acceptance_rate,
                "accepted_of_verified": {"value": counted.value, "error": counted.error},
                "if_ideal": if_ideal(each.factors),
                **explained.as_dict(),
            }
        )
    return found


def _draw(name: str, output: Path | None) -> None:
    from outrider.lab.figures import draw_figure

    assert output is not None
    _write(lambda: draw_figure(name, output), output)


def _write(draw: Any, output: Path) -> None:
    try:
        draw()
    except OSError as error:
        raise fail(f"--output {output}: {error.strerror or error}") from error
