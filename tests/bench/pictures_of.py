"""Pictures of pages as files of docs/, small."""

from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"
COLOURS = 256
SHEET_GAP = 12
SHEET_COLOURS = 224
MAX_BYTES, MAX_BYTES_IN_ALL = 200_000, 1_200_000


def save(page: Page, name: str, folder: Path = DOCS, colours: int = COLOURS) -> None:
    """Save with 256 colours, which are enough and take a third of the space."""
    with Image.open(BytesIO(page.screenshot())) as drawn:
        path = folder / f"{name}.png"
        drawn.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)


def save_sheet(shots: list[bytes], name: str, sheet_width: int, columns: int = 4) -> None:
    """Save screenshots of one size side by side, each scaled to the same width."""
    drawn = [Image.open(BytesIO(shot)).convert("RGB") for shot in shots]
    width = sheet_width // columns
    height = width * drawn[0].height // drawn[0].width
    sheet = Image.new("RGB", (sheet_width, height * -(-len(drawn) // columns)), "white")
    for number, shot in enumerate(drawn):
        small = shot.resize((width - SHEET_GAP, height - SHEET_GAP), Image.Resampling.LANCZOS)
        sheet.paste(small, (number % columns * width, number // columns * height))
    PICTURES.mkdir(exist_ok=True)
    # Median cut would grey the few coloured pixels.
    few = sheet.quantize(SHEET_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURES / f"{name}.png", optimize=True)


def check_sizes() -> None:
    sizes = {str(path.relative_to(DOCS)): path.stat().st_size for path in sorted(DOCS.rglob("*.png"))}
    for name, size in sizes.items():
        print(f"docs/{name}: {size:,} bytes")
    assert max(sizes.values()) <= MAX_BYTES and sum(sizes.values()) <= MAX_BYTES_IN_ALL, sizes
