// The command that runs the script manually, with a button that copies it.

function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // A page loaded over plain HTTP has no clipboard API: copy from a temporary text field.
  const field = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  return Promise.resolve();
}

function render({ model, el }) {
  el.classList.add("labkit-command");
  const code = document.createElement("code");
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy", title: "Copy the command" });
  button.onclick = async () => {
    await copy(model.get("text"));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const show = () => {
    code.textContent = model.get("text");
    code.title = model.get("text");
  };
  model.on("change:text", show);
  show();
  el.append(code, button);
  return () => model.off("change:text", show);
}

export default { render: withHandshake(render) };
