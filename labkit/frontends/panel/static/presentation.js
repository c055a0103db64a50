// Keyboard shortcuts, presentation mode, and ARIA attributes that the widgets lack. Shortcuts work while the panel has
// the focus and no text field is being edited, Escape also outside of the panel. They are handled in the capture phase,
// before the notebook, whose own single-key shortcuts change cells.

const PRESSED = ".widget-toggle-button, .widget-toggle-buttons button";
// closed first by Escape
const EXPANDED = [".labkit-more.mod-active", ".labkit-why.mod-active", ".labkit-compare-more.mod-active"];

const SCROLLED = ".labkit-comparison, .labkit-before, .labkit-diagnoses, .labkit-outcome"; // text without controls

// What is scrolled can be scrolled with the keyboard, too.
function reach(box) {
  if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  else box.removeAttribute("tabindex");
}

function isTyping(element) {
  if (element.isContentEditable || ["TEXTAREA", "SELECT"].includes(element.tagName)) return true;
  return element.tagName === "INPUT" && !["checkbox", "radio", "button"].includes(element.type);
}

// The enclosing panel of an element that may not be in the page yet.
function around(el, then) {
  const panel = el.closest(".labkit");
  if (panel) then(panel);
  else if (!el.labkitGone) requestAnimationFrame(() => around(el, then));
}

// Selects a tab as its tab bar expects it from a keyboard: focus, then Enter.
function choose(tab) {
  tab.focus();
  tab.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
}

class Panel {
  constructor(element, model, button) {
    this.element = element;
    this.model = model;
    this.button = button;
    this.last = null;
    element.tabIndex = -1; // a click on the background focuses the panel, so that its shortcuts work
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "Training lab");
    element.querySelector(".labkit-words")?.setAttribute("role", "status");
    const changed = new MutationObserver((changes) => changes.forEach((one) => this.changed(one)));
    changed.observe(element, { subtree: true, childList: true, attributes: true, attributeFilter: ["class", "disabled"] });
    this.sizes = new ResizeObserver((sizes) => sizes.forEach(({ target }) => reach(target.closest(SCROLLED))));
    const focused = (event) => (this.last = event.target);
    const key = (event) => this.key(event);
    element.addEventListener("focusin", focused);
    const pressed = (event) => this.fold(event.target);
    window.addEventListener("keydown", key, true);
    window.addEventListener("pointerdown", pressed, true);
    this.close = () => {
      changed.disconnect();
      this.sizes.disconnect();
      element.removeEventListener("focusin", focused);
      window.removeEventListener("keydown", key, true);
      window.removeEventListener("pointerdown", pressed, true);
    };
    this.label(element);
    this.show();
  }

  changed({ type, target, addedNodes }) {
    if (type === "childList") addedNodes.forEach((node) => node.querySelectorAll && this.label(node));
    else if (target.matches(PRESSED)) this.press(target);
    else if (target.matches(SCROLLED)) this.label(target.parentElement); // a widget gets its classes later
    if (target.disabled && target === this.last) this.keep(target);
  }

  label(element) {
    for (const button of element.querySelectorAll(PRESSED)) this.press(button);
    for (const part of element.querySelectorAll(`:is(${SCROLLED}), :is(${SCROLLED}) > *`)) this.sizes.observe(part);
  }

  press(button) {
    const value = String(button.classList.contains("mod-active"));
    const name = button.matches(".labkit-more, .labkit-why, .labkit-compare-more") ? "aria-expanded" : "aria-pressed";
    if (button.getAttribute(name) !== value) button.setAttribute(name, value);
  }

  // A pressed button that becomes disabled would lose the focus, and the next keys, to the notebook.
  keep(button) {
    if (![button, document.body, null].includes(document.activeElement)) return;
    const box = button.closest(".widget-box") ?? this.element;
    box.tabIndex = -1;
    box.focus({ preventScroll: true });
  }

  key(event) {
    const path = event.composedPath();
    const inside = path.includes(this.element);
    if (event.ctrlKey || event.metaKey || event.altKey || (!inside && isTyping(path[0]))) return;
    const action = event.key === "Escape" ? this.back() : !inside || isTyping(path[0]) ? null : this.action(event.key);
    if (!action) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (!event.repeat) action();
  }

  action(key) {
    const tab = this.element.querySelectorAll('.labkit-tabs [role="tab"]')[Number(key) - 1];
    if (tab) return () => choose(tab);
    return { r: () => this.toggleRun(), s: () => this.toggle() }[key.toLowerCase()];
  }

  back() {
    const open = this.element.querySelector(EXPANDED.join(", "));
    if (open) return () => (open.click(), open.focus());
    return this.model.get("on") ? () => this.toggle() : null;
  }

  // A click beside an open box closes it: it would cover the tabs and charts.
  fold(target) {
    for (const open of this.element.querySelectorAll(EXPANDED.join(", "))) {
      const box = open.closest(".labkit-options, .labkit-findings");
      if (!box.contains(target)) open.click();
    }
  }

  toggleRun() {
    const buttons = [".labkit-stop:enabled", ".labkit-run:enabled", ".labkit-replay-play"]; // the last one of a recorded run
    buttons.map((name) => this.element.querySelector(name)).find((button) => button?.checkVisibility())?.click();
  }

  toggle() {
    this.model.set("on", !this.model.get("on"));
    this.model.save_changes();
  }

  // In the browser's top layer, so that no other element of the notebook clips or covers it.
  show() {
    const { element, button } = this;
    const on = this.model.get("on");
    const was = element.classList.contains("labkit-presentation");
    button.setAttribute("aria-pressed", String(on));
    button.textContent = on ? "Exit presentation" : "Presentation mode";
    element.classList.toggle("labkit-presentation", on);
    if (on) {
      element.setAttribute("popover", "manual");
      element.showPopover?.();
    } else element.removeAttribute("popover");
    if (on !== was) element.focus({ preventScroll: on });
  }
}

function render({ model, el }) {
  el.classList.add("labkit-presentation-keys");
  const keys = Object.assign(document.createElement("span"), { className: "labkit-keys" });
  keys.innerHTML = "Keys: <kbd>r</kbd> run or stop <kbd>1</kbd>… tabs <kbd>s</kbd> presentation";
  const button = document.createElement("button");
  const title = "Presentation mode: large text for a projector (s; Escape exits)";
  Object.assign(button, { type: "button", className: "labkit-present", title });
  el.append(keys, button);
  let panel = null;
  around(el, (element) => (panel = new Panel(element, model, button)));
  const show = () => panel?.show();
  button.onclick = () => panel?.toggle();
  model.on("change:on", show);
  return () => {
    el.labkitGone = true;
    model.off("change:on", show);
    panel?.close();
  };
}

export default { render: withHandshake(render) };
