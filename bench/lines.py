"""Lines of Python and C++ by package: growth is a decision, so it is printed in every test run.

python -m bench.lines
"""

from pathlib import Path

NANO = Path(__file__).parent.parent / "nano"


def main() -> None:
    rows: dict[str, list[int]] = {}
    sources = [path for kind in ("*.py", "*.cpp", "*.h") for path in NANO.rglob(kind)]
    for path in sources:
        parts = path.relative_to(NANO).parts
        package = parts[0] + "/" if len(parts) > 1 else "(top level)"
        rows.setdefault(package, []).append(len(path.read_text().splitlines()))
    print(f"{'package':14}{'files':>7}{'lines':>8}{'longest':>9}")
    for package, lines in sorted(rows.items(), key=lambda row: -sum(row[1])):
        print(f"{package:14}{len(lines):7}{sum(lines):8}{max(lines):9}")
    everything = [count for lines in rows.values() for count in lines]
    print(f"{'nano':14}{len(everything):7}{sum(everything):8}{max(everything):9}")


if __name__ == "__main__":
    main()
