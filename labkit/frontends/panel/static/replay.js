// The time line of a recorded run: play and pause, a slider over the whole run with its moments, the speed, and a step to
// go to. The kernel sends the "course" of the run, and where the replay is; the page sends what somebody wants to see.

const SPEEDS = [0.25, 1, 4, 16];
const MARKS = { start: "▸", step: "◆", memory: "▲", finding: "⚑", end: "■" };
const NEAR = 0.004; // of a run: marks that are closer stand on each other

function render({ model, el }) {
  el.classList.add("labkit-replay");
  el.dataset.lmSuppressShortcuts = "true"; // Enter and digits belong to the fields here, not to the notebook
  const play = make("button", { type: "button", className: "labkit-replay-play" });
  const track = make("div", { className: "labkit-replay-track" });
  const slider = make("input", { type: "range", min: 0, step: "any", ariaLabel: "moment of the run" });
  const marks = make("div", { className: "labkit-replay-marks" });
  const where = make("span", { className: "labkit-replay-where" });
  const speed = make("select", { ariaLabel: "speed of the replay" });
  const step = make("input", { type: "number", min: 0, ariaLabel: "go to step", placeholder: "step", className: "labkit-replay-step" });
  const jumps = make("div", { className: "labkit-replay-jumps" });
  speed.append(...SPEEDS.map((value) => make("option", { value, textContent: `${value}×` })));
  speed.value = 1;
  track.append(slider, marks);
  const row = make("div", { className: "labkit-replay-row" });
  row.append(play, track, where, speed, step);
  el.append(row, jumps);

  let course = null;
  let playing = false;
  let dragged = false; // what the kernel says must not move the slider under the pointer
  const ask = (message) => model.send(message);
  const seek = (position) => ask({ kind: "seek", position });
  play.onclick = () => ask({ kind: "play", playing: !playing });
  slider.oninput = () => {
    dragged = true;
    seek(Number(slider.value));
  };
  slider.onchange = () => (dragged = false);
  speed.onchange = () => ask({ kind: "speed", speed: Number(speed.value) });
  const go = () => {
    if (step.value !== "") ask({ kind: "step", step: Number(step.value) });
  };
  step.onchange = go;
  step.onkeydown = (event) => {
    if (event.key === "Enter") go(); // outside of a form, Enter changes nothing
  };

  const heard = (message) => {
    if (message.kind === "course") {
      course = message.course;
      el.hidden = course === null;
      if (course === null) return;
      slider.max = course.seconds;
      step.max = course.steps;
      marks.replaceChildren(...course.moments.map((moment) => mark(moment, course.seconds)));
      const profiled = course.moments.filter(({ kind }) => kind === "step").slice(0, -1); // for those, marks are enough
      const offered = course.moments.filter((moment) => !profiled.includes(moment));
      jumps.replaceChildren(...offered.map((moment) => jump(moment, seek)));
    } else if (message.kind === "at" && course) {
      playing = message.playing;
      play.textContent = playing ? "❚❚" : "▶";
      play.setAttribute("aria-label", playing ? "pause the replay" : "play the replay");
      if (!dragged) slider.value = message.position;
      const steps = course.steps ? ` · step ${message.step.toLocaleString("en")} of ${course.steps.toLocaleString("en")}` : "";
      where.textContent = `${clock(message.position, course.seconds)} of ${clock(course.seconds, course.seconds)}${steps}`;
      slider.setAttribute("aria-valuetext", where.textContent);
      for (const button of jumps.children) {
        const near = Math.abs(Number(button.dataset.position) - message.position) <= NEAR * course.seconds;
        button.setAttribute("aria-pressed", String(near));
      }
    }
  };
  el.hidden = true;
  model.on("msg:custom", heard);
  model.send({ kind: "ready" });
  return () => model.off("msg:custom", heard);
}

function make(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

function mark({ kind, what, position }, seconds) {
  const element = make("i", { className: `labkit-moment-${kind}`, title: what });
  element.style.left = `${(100 * position) / (seconds || 1)}%`;
  return element;
}

function jump({ kind, what, position }, seek) {
  const words = kind === "finding" ? "first finding" : what; // which one is said above the time line
  const button = make("button", { type: "button", textContent: `${MARKS[kind]} ${words}`, title: `go to: ${what}` });
  button.className = `labkit-moment-${kind}`;
  button.dataset.position = position;
  button.onclick = () => seek(position);
  return button;
}

function clock(seconds, total) {
  if (total < 1) return `${(1000 * seconds).toFixed(1)} ms`; // the steps of one profile
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  const minutes = Math.floor(whole / 60);
  const rest = String(whole % 60).padStart(2, "0");
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

export default { render: withHandshake(render) };
