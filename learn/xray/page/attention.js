// A head's weights over the text.
"use strict";

function buildHeads() {
  const { heads } = XRAY.model.config;
  radios("heads", Array.from({ length: heads }, (_, i) =>
    radio("head", i, i === XRAY.chosen.head, [String(i)], (value) => XRAY.choose({ head: Number(value) }))));
}

function drawAttention({ token: position, head }, data) {
  const { tokens, config } = XRAY.model;
  const layer = XRAY.layer();
  const all = unpack(data.attention[layer]);
  const keys = position + 1;
  const weights = all.subarray(head * keys, (head + 1) * keys);
  const most = weights.reduce((a, b) => Math.max(a, b));
  const shared = config.heads / config.kv_heads;
  document.getElementById("attention-lead").replaceChildren(
    "What ", el("q", {}, token(tokens[position].text)), ` looks at in block ${layer}. Head ${head} reads key and value head ${Math.floor(head / shared)}`,
    shared > 1 ? `, which ${shared} heads share.` : ".");
  fill("attended", el("div", { class: "low", tabindex: 0, role: "region", "aria-label": "Weights of the head" }, el("ol", { class: "attended", start: 0 }, ...Array.from(weights, (weight, i) => {
    const label = `${token(tokens[i].text)}, ${percent(weight)}`;
    return el("li", { style: `--weight: ${((100 * weight) / most).toFixed(1)}%`, title: label },
      el("span", {}, token(tokens[i].text)), el("small", {}, percent(weight)));
  }))));
  const map = { name: "p", axes: ["heads", "keys"], shape: [config.heads, keys], columns: keys, values: data.attention[layer] };
  fill("attention-map", el("h3", {}, "All heads of this block"),
    heatMap(map, "values", (i) => `: ${token(tokens[i % keys].text)}`));
}
