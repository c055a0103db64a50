// The picture of the machine: shapes and a film of one step, which a stage plays in slow motion. One can stop it and point
// at any moment of the step. In the panel (machine_widget.js) it plays for as long as the run takes steps.

const SHORTEST = 3500; // ms that a step is shown: computation and communication of most steps are too fast to see
const FRAME = 30; // ms between two frames of a film: twice as many would keep the page busy for nothing
const SVG = "http://www.w3.org/2000/svg";

class Stage {
  constructor(element, film) {
    this.element = element;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.controls = document.createElement("div");
    this.controls.className = "labkit-film";
    this.button = document.createElement("button");
    this.button.type = "button";
    this.slider = Object.assign(document.createElement("input"), { type: "range", min: 0, step: 1 });
    this.slider.setAttribute("aria-label", "moment of the step");
    this.caption = document.createElement("span");
    this.controls.append(this.button, this.slider, this.caption);
    element.replaceChildren(this.svg, this.controls);
    this.held = false; // somebody has stopped the film, or points at a moment
    this.button.addEventListener("click", () => {
      this.held = this.playing;
      this.play(!this.playing);
    });
    this.slider.addEventListener("input", () => {
      this.held = true;
      this.play(false);
      this.show(Number(this.slider.value));
    });
    this.calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.take(film);
  }

  take(film) {
    this.film = film;
    this.shapes = new Map();
    this.frame = -1;
    this.svg.setAttribute("viewBox", `0 0 ${film.width} ${film.height}`);
    this.svg.setAttribute("aria-label", film.label);
    this.svg.replaceChildren(...Object.entries(film.shapes).map(([name, [tag, attributes]]) => {
      const shape = document.createElementNS(SVG, tag);
      this.shapes.set(name, shape);
      set(shape, attributes);
      return shape;
    }));
    this.slider.max = film.frames.length - 1;
    const moves = film.frames.length > 1;
    this.controls.hidden = !moves;
    this.held &&= moves;
    this.moved = null;
    this.show(this.shown ?? film.peak);
    this.moves(film.moves && moves);
  }

  change(shapes, moves, label) {
    this.svg.setAttribute("aria-label", label);
    for (const [name, attributes] of Object.entries(shapes)) set(this.shapes.get(name), attributes);
    if (Object.keys(shapes).length) {
      this.frame = -1; // a shape that the frames change may have been set
      this.show(this.shown);
    }
    this.moves(moves && this.film.frames.length > 1);
  }

  // The run goes on, or not: the film follows, unless somebody holds it.
  moves(moves) {
    if (moves === this.moved) return;
    this.moved = moves;
    if (this.held) return;
    this.play(moves && !this.calm);
    if (!moves) this.show(this.film.peak);
  }

  play(playing) {
    this.playing = playing;
    this.svg.classList.toggle("labkit-still", !this.playing);
    this.button.textContent = this.playing ? "❚❚" : "▶";
    this.button.setAttribute("aria-label", this.playing ? "pause the step" : "play the step");
    cancelAnimationFrame(this.next);
    if (!this.playing) return;
    const { frames, seconds, timed } = this.film;
    const takes = timed ? Math.max(SHORTEST, 1000 * seconds) : SHORTEST;
    let began = performance.now() - (this.shown / frames.length) * takes;
    let shown = 0;
    const draw = (now) => {
      this.next = requestAnimationFrame(draw);
      if (now - shown < FRAME) return;
      shown = now;
      if (now - began >= takes) began = now;
      this.show(Math.floor(((now - began) / takes) * frames.length));
    };
    this.next = requestAnimationFrame(draw);
  }

  show(frame) {
    const { frames, heads, length, seconds, timed, what } = this.film;
    frame = Math.max(0, Math.min(frame, frames.length - 1));
    if (frame < this.frame) this.frame = -1;
    while (this.frame < frame) for (const [name, attributes] of Object.entries(frames[++this.frame])) set(this.shapes.get(name), attributes);
    this.shown = frame;
    const share = frame / Math.max(1, frames.length - 1);
    for (const head of heads) this.shapes.get(head).setAttribute("transform", `translate(${share * length} 0)`);
    this.slider.value = frame;
    const moment = timed
      ? `${duration(share * seconds)} of ${duration(seconds)}`
      : `operation ${Math.round(share * seconds)} of ${Math.round(seconds)}`;
    this.slider.setAttribute("aria-valuetext", moment);
    const slowed = SHORTEST / (1000 * seconds);
    this.caption.textContent = `${moment} · ${what}${timed && seconds && slowed > 1.5 ? ` · slowed ${Math.round(slowed)} times` : ""}`;
  }

  close() {
    cancelAnimationFrame(this.next);
  }
}

function set(shape, { text, ...attributes }) {
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  if (text !== undefined && shape.textContent !== text) shape.textContent = text;
}

function duration(seconds) {
  return seconds < 10 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
}
