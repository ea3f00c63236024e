// One op: its equations, what it computed for the token, what that cost, and the code of its definitions.
"use strict";

let shownView = "values"; // of the heat maps

function drawOp({ floor, op }, data) {
  const visit = data.visits.find((each) => each.op === op && each.layer === (floor === "out" ? null : floor));
  const { listings } = XRAY.model.ops.find((each) => each.op === op);
  const maps = el("div", { class: "maps" });
  const choice = el("fieldset", { class: "choice" }, el("legend", {}, "Show"),
    ...Object.entries(VIEWS).map(([view, [name]]) => radio("view", view, view === shownView, [name], (value) => {
      shownView = value;
      drawMaps(maps, visit);
    })));
  drawMaps(maps, visit);
  fill("op",
    el("h3", {}, ABOUT[op][0], " ", el("code", {}, op)),
    el("p", {}, ABOUT[op][1]),
    el("div", { class: "formulas" }, ...listings.map(formula)),
    el("h4", {}, "The definition beside the form that runs"),
    closeness(visit),
    choice,
    maps,
    el("h4", {}, "What it costs"),
    cost(visit, data.visits.filter((each) => each.layer === visit.layer)),
    el("h4", {}, "The definition's code"),
    el("p", {}, "Lines that ran for this op are marked, with the shapes of the arrays that each line made."),
    ...listings.map(code));
}

function formula(listing) {
  const set = XRAY.model.formulas[listing.name];
  const figure = el("figure", { class: "formula", tabindex: 0 }); // a long formula scrolls, by keyboard, too
  if (!set) return figure;
  figure.innerHTML = set; // from the program that made this page, never from a text
  figure.append(el("figcaption", {}, listing.name));
  return figure;
}

function drawMaps(place, visit) {
  const outputs = visit.outputs.map(({ map }) => {
    const [differences, shares] = [unpack(map.difference), unpack(map.share)];
    const values = unpack(map.values);
    const tell = (i) => `; definition ${number(values[i] - differences[i], 9)}, ${percent(shares[i])} of the bound`;
    return heatMap(map, shownView, tell);
  });
  place.replaceChildren(
    el("div", {}, el("h5", {}, "given"), heatMap(visit.given)),
    el("div", {}, el("h5", {}, "made"), ...outputs));
}

function closeness(visit) {
  const rows = visit.outputs.map((output) => el("tr", {},
    el("th", { scope: "row" }, output.map.name),
    el("td", {}, number(output.norm)),
    el("td", {}, number(output.reference, 9)),
    el("td", {}, number(output.running, 9)),
    el("td", {}, number(output.ulps, 2)),
    el("td", {}, el("span", { class: output.share <= 1 ? "gauge" : "gauge over" }, el("span", { style: `width: ${Math.min(1, output.share ?? 1) * 100}%` })), percent(output.share))));
  const heads = ["", "norm", "definition, float64", `as it ran, ${XRAY.model.dtype}`, "units in the last place", "of the proven bound"];
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "The definition beside the form that runs" },
    el("table", {},
      el("caption", {}, "Of each result, the number that uses most of its bound"),
      el("thead", {}, el("tr", {}, ...heads.map((head) => head ? el("th", { scope: "col" }, head) : el("td")))),
      el("tbody", {}, ...rows)));
}

function cost(visit, all) {
  const bar = (name, key, text) => {
    const total = all.reduce((sum, each) => sum + each[key], 0);
    const parts = all.map((each) =>
      el("span", { class: each === visit ? "this" : "", style: `flex-grow: ${each[key] / total || 0}`, title: `${each.op}: ${text(each[key])}` }));
    const among = all.length > 1 ? `, ${percent(visit[key] / total)} of the block` : "";
    return el("div", { class: "bar" }, el("span", { class: "bar-name" }, name),
      el("div", { class: "parts", "aria-hidden": "true" }, ...parts), el("span", {}, `${text(visit[key])}${among}`));
  };
  return el("div", { class: "bars" },
    bar("read", "bytes", (value) => amount(value, "B")),
    bar("operations", "flops", (value) => amount(value, "")),
    bar("time", "seconds", time),
    el("small", {}, "Bytes and operations are those of one token; the time is that of the whole text on the machine that made this page."));
}

function code(listing) {
  const ran = new Map(listing.steps.map((step) => [step.line, step.made]));
  const lines = listing.lines.map((text, i) => {
    const made = Object.entries(ran.get(i) ?? {}).map(([name, shape]) => `${name} [${shape.join(" ")}]`).join("   ");
    return el("span", { class: ran.has(i) ? "line ran" : "line" },
      el("span", { class: "number", "aria-hidden": "true" }, String(listing.numbers[i])),
      ran.has(i) ? el("span", { class: "hidden" }, "ran: ") : "", `${text}\n`,
      made ? el("span", { class: "shape" }, `${made}\n`) : "");
  });
  return el("details", { class: "code", open: true },
    el("summary", {}, el("b", {}, listing.name), ` ${listing.file}:${listing.first}`),
    el("pre", { tabindex: 0, role: "region", "aria-label": `Code of ${listing.name}` }, el("code", {}, ...lines)));
}
