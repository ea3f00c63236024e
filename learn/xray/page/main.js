// The page: the model in a line, the tokens, and every view.
"use strict";

function buildTokens() {
  const { tokens, chosen } = XRAY.model;
  radios("text", [el("div", { class: "tokens" }, ...tokens.map(({ text, id }, i) =>
    radio("token", i, i === XRAY.chosen.token, [token(text)], (value) => XRAY.choose({ token: Number(value) }),
      { disabled: !chosen.includes(i), title: `position ${i}, id ${id}` })))]);
}

function describeModel() {
  const { name, dtype, config, weights } = XRAY.model;
  const facts = [
    [name, "model"], [amount(weights, ""), "weights in matrices"], [config.layers, "blocks"], [config.dim, "dim"],
    [`${config.heads} / ${config.kv_heads}`, "heads / kv_heads"], [config.head_dim, "head_dim"], [config.ffn, "ffn"],
    [config.vocab.toLocaleString("en"), "vocab"], [dtype, "dtype that ran"],
  ];
  fill("model", ...facts.map(([value, what]) => el("span", { class: "fact" }, el("b", {}, String(value)), ` ${what}`)));
}

function start() {
  const { model } = XRAY;
  Object.assign(XRAY.chosen, { token: Math.max(...model.chosen), floor: model.layers[0], op: "norm_qkv", head: 0 });
  describeModel();
  buildTokens();
  buildTower();
  buildHeads();
  buildRope();
  buildCache();
  buildSampling();
  buildQuantize();
  for (const view of [drawTower, drawOp, drawAttention, drawRope, drawKept, drawSampling]) XRAY.view(view);
  return XRAY.choose({});
}

start().then(() => document.documentElement.setAttribute("data-ready", ""));
