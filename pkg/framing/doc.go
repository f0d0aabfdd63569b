// Package framing keeps requests from being smuggled past net/http.
//
// A proxy is safe from smuggling where it and everything before it agree on where each
// request ends. net/http is lenient: it takes heads whose lines end in a bare line feed, and
// Content-Length beside Transfer-Encoding. Here what is read from an HTTP/1 connection is
// looked at before net/http gets it. Each head, chunk line and trailer is checked as
// it passes, and bodies are followed, so that the next head is found, pipelined ones too. What
// could be framed in two ways is refused: the requests before it are answered,
// then comes 400, and the connection closes.
//
// Nothing is held back and nothing is changed, except that what is refused is replaced by
// something that net/http refuses. HTTP/2 and upgraded connections pass unseen.
package framing
