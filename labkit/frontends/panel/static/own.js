// In front of each of our programs: `answering(render)` answers the kernel, so that it knows whether its messages arrive.

function answering(render) {
  return (context) => {
    const { model } = context;
    const answer = (message) => {
      if (message.kind === "hello") model.send({ kind: "heard" });
    };
    model.on("msg:custom", answer);
    model.send({ kind: "here" });
    const close = render(context);
    return () => {
      model.off("msg:custom", answer);
      close();
    };
  };
}
