// Search from a folder: browsers refuse workers to file:// pages, so a hidden frame runs the worker's script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = this.inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve))
      this.inside.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
