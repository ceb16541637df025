"""Print the paper's Table 3 beside what the planner makes of Table 1 and one set of V100 constants, as Markdown."""

from gsplit_bench.paper_table import GRAPHS, MODELS, predict_table


def main() -> None:
    """One row per model and system, one column per graph."""
    print("| model | system | " + " | ".join(GRAPHS) + " |")
    print("|---|---|" + "---|" * len(GRAPHS))
    table = predict_table()
    for model in MODELS:
        for system in dict.fromkeys(row.system for row in table):
            cells = [row for row in table if (row.model, row.system) == (model, system)]
            shown = [f"{row.predicted_s:.1f} / {row.measured_s:.1f} ({row.error:+.0%})" for row in cells]
            print(f"| {model} | {system} | " + " | ".join(shown) + " |")
    print(f"\npredicted / measured seconds per epoch; largest error {max(abs(row.error) for row in table):.0%}")


if __name__ == "__main__":
    main()
