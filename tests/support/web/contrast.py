"""How well letters in drawings can be read, which axe-core does not look at."""

from typing import Any

ENOUGH_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
_CONTRASTS = """([texts, behind]) => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  return [...document.querySelectorAll(texts)].map((text) => {
    const box = text.parentElement.querySelector(behind);
    const back = box ? getComputedStyle(box).fill : getComputedStyle(text.closest("section")).backgroundColor;
    const [one, other] = [getComputedStyle(text).fill, back].map(light);
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  });
}"""


def contrasts(page: Any, texts: str, behind: str = "nothing") -> list[float]:
    """The contrast of each text (a selector) to what is drawn behind it (a selector), otherwise to its section."""
    found: list[float] = page.evaluate(_CONTRASTS, [texts, behind])
    return found
