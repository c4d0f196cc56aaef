// Make search work in pages that are opened as files. A browser starts no worker for file://, so an
// iframe runs the worker's script. The theme's plugin `offline` would load code from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const scope = this.frame.contentWindow
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((resolve, reject) => {
        const script = scope.document.createElement("script")
        script.onload = resolve
        script.onerror = reject
        script.src = url
        scope.document.body.append(script)
      })
    }

    async postMessage(data) {
      await this.loaded
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
