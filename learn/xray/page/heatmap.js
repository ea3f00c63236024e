// An array as a field of cells: one color above zero, one below, stronger where the number is larger.
"use strict";

const VIEWS = {
  values: ["values", "how large each number is"],
  difference: ["distance", "how far each number is from its definition"],
  share: ["share of the bound", "how much of its proven bound each distance uses"],
};

// `map` is what Python describes as a heat map; `tell(i)` adds words to the reading of cell i.
function heatMap(map, view = "values", tell = () => "") {
  const shown = unpack(map[view] ?? map.values);
  const all = map.shape.reduce((product, n) => product * n, 1);
  const { columns } = map;
  const rows = Math.ceil(shown.length / columns);
  const largest = shown.reduce((top, value) => Math.max(top, Math.abs(value)), 0) || 1;
  const side = Math.max(5, Math.min(16, Math.floor(340 / columns)));
  const name = (i) => (map.axes.length > 1 ? [Math.floor(i / columns), i % columns] : [i]).join(", ");

  const drawn = chart({
    label: `${map.name}, ${axes(map.axes, map.shape)}: ${VIEWS[view][1]}`,
    count: shown.length,
    step: columns,
    height: rows * side,
    width: columns * side,
    draw(context, width, height, marked, color) {
      const [w, h] = [width / columns, height / rows];
      shown.forEach((value, i) => {
        const [x, y] = [(i % columns) * w, Math.floor(i / columns) * h];
        context.fillStyle = color.cell;
        context.fillRect(x, y, w - 0.5, h - 0.5);
        context.fillStyle = rgba(value < 0 ? color.minus : color.plus, Math.sqrt(Math.abs(value) / largest));
        context.fillRect(x, y, w - 0.5, h - 0.5);
        if (i !== marked) return;
        context.strokeStyle = color.ink;
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, w - 2.5, h - 2.5);
      });
    },
    at(x, y, width, height) {
      const [column, row] = [Math.floor((x / width) * columns), Math.floor((y / height) * rows)];
      const i = row * columns + column;
      return column >= 0 && column < columns && row >= 0 && i < shown.length ? i : -1;
    },
    tell: (i) => `${map.name}[${name(i)}] = ${number(unpack(map.values)[i], 7)}${tell(i)}`,
  });
  const left = shown.length < all ? `, its first ${shown.length} numbers` : "";
  const sign = shown.some((value) => value < 0) ? "± " : "";
  const scale = view === "share" ? percent(largest) : sign + number(largest);
  const caption = el("figcaption", {}, el("b", {}, map.name), ` ${axes(map.axes, map.shape)}${left}; up to ${scale}`);
  return el("figure", { class: "map" }, caption, drawn);
}
