// A click on a heading sorts its table: by number where every cell begins with one, else by text; a second one reverses.
document.addEventListener("click", (event) => {
  const heading = event.target.closest(".md-typeset table:not([class]) th");
  if (!heading) return;
  const body = heading.closest("table").tBodies[0];
  const direction = heading.ariaSort === "ascending" ? -1 : 1;
  for (const other of heading.parentNode.cells) other.ariaSort = null;
  heading.ariaSort = direction === 1 ? "ascending" : "descending";
  const units = { k: 1e3, M: 1e6, G: 1e9 };
  const keyed = [...body.rows].map((row) => {
    const text = (row.cells[heading.cellIndex]?.textContent ?? "").trim();
    const found = text.replaceAll(",", "").replace("−", "-").match(/^[≥>]?\s*([-+]?\d[\d.]*(?:e[-+]?\d+)?)([kMG]?)\b/);
    return { row, text, number: found ? found[1] * (units[found[2]] ?? 1) : null };
  });
  const isText = keyed.every(({ number }) => number === null);
  keyed.sort((a, b) => {
    if (isText) return direction * a.text.localeCompare(b.text);
    if (a.number === null || b.number === null) return (a.number === null) - (b.number === null); // dashes stay last
    return direction * (a.number - b.number);
  });
  body.append(...keyed.map(({ row }) => row));
});
// A picture that is wider than the page says so in its caption.
const markWide = () => {
  for (const picture of document.querySelectorAll(".picture")) {
    picture.toggleAttribute("data-wide", picture.scrollWidth > picture.clientWidth + 1);
  }
};
addEventListener("load", markWide);
addEventListener("resize", markWide);
