// What is chosen, and the data that belongs to it. Data files assign to XRAY.model and XRAY.tokens.
"use strict";

const FOLDER = document.currentScript.src.replace(/[^/]*$/, ""); // of this script and of the data

const XRAY = {
  model: null,
  tokens: {},
  chosen: { token: 0, floor: 0, op: "norm_qkv", head: 0 }, // floor: a layer, or "out" after the last
  views: [],

  // Have a function called with what is chosen, and the data of its token, whenever either changes.
  view(draw) {
    this.views.push(draw);
  },

  async choose(change) {
    Object.assign(this.chosen, change);
    const { token } = this.chosen;
    await this.load(token);
    if (token === this.chosen.token) this.draw(); // else another was chosen while this one loaded
  },

  draw() {
    for (const draw of this.views) draw(this.chosen, this.tokens[this.chosen.token]);
  },

  load(position) {
    if (this.tokens[position]) return Promise.resolve();
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${FOLDER}token-${position}.js`;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${script.src} is missing`));
      document.head.append(script);
    });
  },

  // The layer whose attention is shown: the last one that was looked into, where none is chosen.
  layer() {
    return this.chosen.floor === "out" ? this.model.layers.at(-1) : this.chosen.floor;
  },
};

// Numbers from base64 of little-endian float32.
function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
