// In front of each of our programs: the kernel sends "ping" to every rendered view, to find out whether its messages
// arrive, and `withHandshake(render)` answers "pong".

function withHandshake(render) {
  return (context) => {
    const { model } = context;
    const answer = (message) => {
      if (message.kind === "ping") model.send({ kind: "pong" });
    };
    model.on("msg:custom", answer);
    model.send({ kind: "rendered" });
    const close = render(context);
    return () => {
      model.off("msg:custom", answer);
      close();
    };
  };
}
