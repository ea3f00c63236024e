// A row of a matrix under each scheme: values, codes and errors beside what is guaranteed; and what the model tells.
"use strict";

const SCHEME = { name: null, matrix: null };

function buildQuantize() {
  const { quantize } = XRAY.model;
  SCHEME.name = quantize.names.includes("q4") ? "q4" : quantize.names[0];
  SCHEME.matrix = Object.keys(quantize.matrices)[0];
  const choices = (id, key, values) => radios(id, values.map((value) => radio(key, value, value === SCHEME[key === "scheme" ? "name" : key], [value], (chosen) => {
    SCHEME[key === "scheme" ? "name" : key] = chosen;
    drawQuantize();
  })));
  choices("schemes", "scheme", quantize.names);
  choices("matrices", "matrix", Object.keys(quantize.matrices));
  drawQuantize();
}

function drawQuantize() {
  const { quantize } = XRAY.model;
  const scheme = quantize.schemes[SCHEME.name];
  const row = scheme.rows[SCHEME.matrix];
  const [weights, restored, error, guaranteed, scales] = ["weights", "restored", "error", "guaranteed", "scales"].map((part) => row[part] && unpack(row[part]));
  const count = weights.length;
  const tell = (i) => [
    `weight ${i}: ${number(weights[i], 6)}`,
    row.codes ? `, code ${row.codes[i]}` : "",
    scales ? `, scale ${number(scales[i], 5)}` : "",
    ` → ${number(restored[i], 6)}; off ${number(error[i], 3)}`,
    guaranteed ? ` of ${number(guaranteed[i], 3)} guaranteed` : "",
  ].join("");
  const at = (x, y, width) => Math.max(0, Math.min(count - 1, Math.floor((x / width) * count)));
  const top = Math.max(...weights.map(Math.abs), ...restored.map(Math.abs)) || 1;
  const most = Math.max(...error.map(Math.abs), ...(guaranteed ?? [])) || 1;

  const values = chart({
    label: "Weights, and what their codes stand for", height: 150, count, tell, at,
    draw(context, width, height, marked, color) {
      const [w, middle] = [width / count, height / 2];
      const y = (value) => middle - (value / top) * (middle - 4);
      context.fillStyle = color.line;
      context.fillRect(0, middle, width, 1);
      for (let i = 0; i < count; i++) {
        context.fillStyle = i === marked ? color.ink : color.faint;
        context.globalAlpha = i === marked ? 1 : 0.45;
        context.fillRect(i * w + w / 2 - 0.5, Math.min(middle, y(weights[i])), 1, Math.abs(y(weights[i]) - middle));
        context.globalAlpha = 1;
        context.fillStyle = color.accent;
        context.fillRect(i * w + w * 0.15, y(restored[i]) - 1.25, w * 0.7, 2.5);
      }
    },
  });
  const errors = chart({
    label: "Errors, and what is guaranteed", height: 90, count, tell, at,
    draw(context, width, height, marked, color) {
      const w = width / count;
      for (let i = 0; i < count; i++) {
        const part = (value, fill) => {
          context.fillStyle = fill;
          const h = (value / most) * (height - 4);
          context.fillRect(i * w + w * 0.1, height - h, w * 0.8, h);
        };
        if (guaranteed) part(guaranteed[i], color.line);
        part(Math.abs(error[i]), i === marked ? color.ink : color.warm);
      }
    },
  });
  fill("row",
    el("p", {}, `${SCHEME.name}: ${number(scheme.bits)} bits a weight with scales, in rows of 4,096. Guaranteed: ${scheme.guarantee}. `,
      el("code", {}, scheme.file), ` defines it. Row 0 of block ${quantize.layer}'s ${SCHEME.matrix}, quantized by itself`,
      scheme.by_inputs ? " for the inputs that this text gives it" : "",
      `, ${count === quantize.matrices[SCHEME.matrix] ? "" : "its first "}${count} weights; root mean square error ${number(row.root_mean_square, 3)}.`),
    quantize.left_out.length ? el("p", {}, `${quantize.left_out.join(", ")}, which look at inputs, are left out of pages of large models.`) : "",
    el("div", { class: "two" },
      el("figure", {}, el("figcaption", {}, el("b", {}, "Weights"), " and the levels that their codes stand for"), values),
      el("figure", {}, el("figcaption", {}, el("b", {}, "Errors"), guaranteed ? " before what is guaranteed" : "; of a single weight nothing is guaranteed"), errors)));
  drawTold(quantize, scheme);
}

function drawTold(quantize, scheme) {
  if (!quantize.told) {
    fill("told", el("p", {}, "What the model tells under each scheme is left out of pages of large models."));
    return;
  }
  if (!scheme.told) {
    fill("told", el("p", {}, `What the model tells under ${SCHEME.name} is left out: it is calibrated on other texts first. docs/gallery.md has its KL.`));
    return;
  }
  const prompt = XRAY.model.tokens.filter(({ text }, i) => i || !/^<.*>$/.test(text)).map(({ text }) => text).join("").trimStart();
  const parting = scheme.told.findIndex((text, i) => text !== quantize.told[i]);
  const kept = parting < 0 ? scheme.told.length : parting;
  const told = (title, texts, same) => el("div", {}, el("h4", {}, title),
    el("p", { class: "told" }, el("span", { class: "prompt" }, prompt), texts.slice(0, same).join(""), el("mark", {}, texts.slice(same).join(""))));
  fill("told",
    el("h3", {}, "What the model then tells"),
    el("p", {}, `Mean KL divergence from the model as it is: `, el("b", { id: "divergence" }, number(scheme.divergence, 3)), " nats a token. The likeliest token each time; where the texts part, the rest is marked."),
    el("div", { class: "two" }, told("As it is", quantize.told, kept), told(`Under ${SCHEME.name}`, scheme.told, kept)));
}
