// What moves on a page: a picture with a button that stops it, and explorers without a kernel.
// Their frames were computed when the site was built, the controls choose
// one. A page holds the first frame; the others come from one file when a control is first used.
"use strict";
(() => {
  const loaded = {}; // name: promise of [[state, picture, words], ...]
  const waiting = {}; // name: what keeps that promise

  // Each file of frames is a call of this. A script, and no fetch: it works from a folder too.
  window.courseFrames = (name, frames) => waiting[name](frames);

  function load(box) {
    const { frames: name, src } = box.dataset;
    loaded[name] ??= new Promise((resolve, reject) => {
      waiting[name] = resolve;
      const script = document.createElement("script");
      script.src = src;
      script.onerror = () => reject(new Error(`no frames at ${src}`));
      document.head.append(script);
    });
    return loaded[name];
  }

  // The frame of this state. Where the grid has a hole: the one that agrees with the control that
  // moved, and then with as many others as can be.
  function nearest(frames, state, moved) {
    const score = ([values]) =>
      values.reduce((sum, v, i) => sum + (v === state[i]) * (i === moved ? 1000 : 1), 0);
    return frames.reduce((best, frame) => (score(frame) > score(best) ? frame : best));
  }

  function say(control) {
    if (control.type !== "range") return;
    const text = JSON.parse(control.dataset.texts)[control.value];
    control.setAttribute("aria-valuetext", text);
    control.nextElementSibling.textContent = text;
  }

  async function show(box, controls, moved) {
    say(controls[moved]);
    const frames = await load(box);
    const state = controls.map((control) => Number(control.value));
    const [values, picture, words] = nearest(frames, state, moved);
    controls.forEach((control, i) => {
      control.value = values[i];
      say(control);
    });
    box.querySelector(".frames-picture").innerHTML = picture;
    box.querySelector(".frames-words").textContent = words;
    box.dataset.state = values;
  }

  // Paper is white.
  const theme = document.documentElement.dataset;
  matchMedia("print").addEventListener("change", ({ matches }) => {
    if (matches) theme.shown = theme.theme;
    theme.theme = matches ? "light" : theme.shown;
  });

  for (const box of document.querySelectorAll(".moving")) {
    const button = box.querySelector("button");
    button.hidden = matchMedia("(prefers-reduced-motion: reduce)").matches;
    button.addEventListener("click", () => {
      button.textContent = box.classList.toggle("paused") ? "Go on" : "Pause";
    });
  }

  for (const box of document.querySelectorAll(".frames")) {
    const controls = [...box.querySelectorAll("[data-control]")];
    controls.forEach((control, i) => {
      control.addEventListener("input", () => show(box, controls, i));
    });
    box.querySelector(".frames-controls").hidden = false;
  }
})();
