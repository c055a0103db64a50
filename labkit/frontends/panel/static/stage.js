// The panel's keys, its view for a projector, and what the widgets do not tell a screen reader. Keys count while the panel has the
// focus and nobody types, Escape wherever nobody types outside of the panel; they are taken before the notebook sees them, whose own single keys change cells.

const PRESSED = ".widget-toggle-button, .widget-toggle-buttons button";
const FOLDS = [".labkit-more.mod-active", ".labkit-why.mod-active", ".labkit-compare-recorded.mod-active"]; // what Escape closes first

function isTyping(element) {
  if (element.isContentEditable || ["TEXTAREA", "SELECT"].includes(element.tagName)) return true;
  return element.tagName === "INPUT" && !["checkbox", "radio", "button"].includes(element.type);
}

// The panel around an element that may not be in the page yet.
function around(el, then) {
  const panel = el.closest(".labkit");
  if (panel) then(panel);
  else if (!el.labkitGone) requestAnimationFrame(() => around(el, then));
}

// A tab is chosen as its bar takes it from a keyboard: the focus, then Enter.
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
    element.tabIndex = -1; // a click on its ground gives it the focus, and so the keys
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "Training lab");
    element.querySelector(".labkit-words")?.setAttribute("role", "status");
    const changed = new MutationObserver((changes) => changes.forEach((one) => this.changed(one)));
    changed.observe(element, { subtree: true, childList: true, attributes: true, attributeFilter: ["class", "disabled"] });
    const focused = (event) => (this.last = event.target);
    const key = (event) => this.key(event);
    element.addEventListener("focusin", focused);
    window.addEventListener("keydown", key, true);
    this.close = () => {
      changed.disconnect();
      element.removeEventListener("focusin", focused);
      window.removeEventListener("keydown", key, true);
    };
    this.tell(element);
    this.show();
  }

  changed({ type, target, addedNodes }) {
    if (type === "childList") addedNodes.forEach((node) => node.querySelectorAll && this.tell(node));
    else if (target.matches(PRESSED)) this.press(target);
    if (target.disabled && target === this.last) this.keep(target);
  }

  tell(element) {
    for (const button of element.querySelectorAll(PRESSED)) this.press(button);
  }

  press(button) {
    const value = String(button.classList.contains("mod-active"));
    const name = button.matches(".labkit-more, .labkit-why, .labkit-compare-recorded") ? "aria-expanded" : "aria-pressed";
    if (button.getAttribute(name) !== value) button.setAttribute(name, value);
  }

  // A button that was pressed and can be pressed no more would let the focus, and so the next keys, go to the notebook.
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
    const open = this.element.querySelector(FOLDS.join(", "));
    if (open) return () => (open.click(), open.focus());
    return this.model.get("on") ? () => this.toggle() : null;
  }

  toggleRun() {
    const button = this.element.querySelector(".labkit-stop:enabled") ?? this.element.querySelector(".labkit-run:enabled");
    button?.click();
  }

  toggle() {
    this.model.set("on", !this.model.get("on"));
    this.model.save_changes();
  }

  // In the browser's top layer, so that nothing of the notebook around it clips or covers it.
  show() {
    const { element, button } = this;
    const on = this.model.get("on");
    const was = element.classList.contains("labkit-stage");
    button.setAttribute("aria-pressed", String(on));
    button.textContent = on ? "Leave stage" : "Stage";
    element.classList.toggle("labkit-stage", on);
    if (on) {
      element.setAttribute("popover", "manual");
      element.showPopover?.();
    } else element.removeAttribute("popover");
    if (on !== was) element.focus({ preventScroll: on });
  }
}

function render({ model, el }) {
  el.classList.add("labkit-stage-keys");
  const keys = Object.assign(document.createElement("span"), { className: "labkit-keys" });
  keys.innerHTML = "keys: <kbd>r</kbd> run or stop <kbd>1</kbd>… tabs <kbd>s</kbd> stage";
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "labkit-to-stage", title: "Large, for a projector (s); Escape leaves" });
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

export default { render };
