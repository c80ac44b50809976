package report

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/svg"
)

// A Server shows the page of runs to browsers, and keeps it up to date. On the loopback interface
// it answers requests that name it by a loopback name: a page of another site cannot read it, even
// if its name leads to this host. On other interfaces it asks for a token.
type Server struct {
	listener net.Listener
	token    string // "" on the loopback interface
	mu       sync.Mutex
	runs     []*Run
}

// Listen takes an address, such as 127.0.0.1:8080; port 0 is a free one.
func Listen(address string, runs []*Run) (*Server, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, diag.New(diag.BadInput, "%q is not an address to listen on", address).
			Try("--listen 127.0.0.1:8080").Wrap(err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot listen on %s", address).Wrap(err).
			Try("take another port, or any free one: --listen 127.0.0.1:0")
	}
	s := &Server{listener: l, runs: runs}
	if !loopback(host) {
		secret := make([]byte, 18)
		_, _ = rand.Read(secret) // never fails
		s.token = base64.RawURLEncoding.EncodeToString(secret)
	}
	return s, nil
}

// loopback reports whether a name or an address is only reached from this host.
func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// URL is where a browser finds the page, with the token that it needs.
func (s *Server) URL() string {
	u := url.URL{Scheme: "http", Host: s.listener.Addr().String(), Path: "/"}
	if s.token != "" {
		if _, port, err := net.SplitHostPort(u.Host); err == nil {
			if ip := net.ParseIP(hostOf(u.Host)); ip == nil || ip.IsUnspecified() {
				u.Host = net.JoinHostPort("HOST", port)
			}
		}
		u.RawQuery = url.Values{"token": {s.token}}.Encode()
	}
	return u.String()
}

// Serve answers until the context ends.
func (s *Server) Serve(ctx context.Context) error {
	server := &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return diag.New(diag.FileError, "cannot go on listening").Wrap(err)
	}
	return nil
}

// cookie holds the token after the first request.
const cookie = "deepwell-token"

// ServeHTTP implements http.Handler: / is the page, /body what of it changes.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("X-Frame-Options", "DENY")
	if why := s.refused(r); why != "" {
		http.Error(w, why, http.StatusForbidden)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.Error(w, "only GET", http.StatusMethodNotAllowed)
		return
	}
	if s.token != "" {
		http.SetCookie(w, &http.Cookie{Name: cookie, Value: s.token, HttpOnly: true,
			SameSite: http.SameSiteStrictMode, Path: "/"})
	}
	switch r.URL.Path {
	case "/":
		secret := make([]byte, 12)
		_, _ = rand.Read(secret)
		nonce := base64.StdEncoding.EncodeToString(secret)
		h.Set("Content-Security-Policy", fmt.Sprintf("default-src 'none'; style-src 'unsafe-inline';"+
			" script-src 'nonce-%s'; connect-src 'self'; img-src data:; base-uri 'none';"+
			" form-action 'none'; frame-ancestors 'none'", nonce))
		h.Set("Content-Type", "text/html; charset=utf-8")
		s.write(w, func(p page) {
			p.Add(`<div id="live">`)
			p.body(s.runs)
			p.Add(`</div><p role="status" id="state"></p><script nonce="%s">%s</script>`, nonce, script)
		})
	case "/body":
		h.Set("Content-Type", "text/html; charset=utf-8")
		s.update(w)
	default:
		http.NotFound(w, r)
	}
}

// refused says why a request is not answered; "" if it is.
func (s *Server) refused(r *http.Request) string {
	if origin := r.Header.Get("Origin"); origin != "" && origin != "http://"+r.Host {
		return "requests of other sites are refused"
	}
	if s.token == "" {
		if !loopback(hostOf(r.Host)) {
			return "this address is only for names of this host, such as localhost"
		}
		return ""
	}
	given := r.URL.Query().Get("token")
	if c, err := r.Cookie(cookie); given == "" && err == nil {
		given = c.Value
	}
	if subtle.ConstantTimeCompare([]byte(given), []byte(s.token)) != 1 {
		return "the address needs its token: deepwell serve has printed it"
	}
	return ""
}

// hostOf is the host of an address with or without a port.
func hostOf(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return (&url.URL{Host: address}).Hostname()
}

// write reads what is new and writes a whole page.
func (s *Server) write(w http.ResponseWriter, body func(page)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.read(w) {
		return
	}
	p := page{svg.New(title(s.runs), svg.Style, line(s.runs))}
	body(p)
	_, _ = w.Write(p.End())
}

// update writes what of the page changes.
func (s *Server) update(w http.ResponseWriter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.read(w) {
		return
	}
	p := page{&svg.Page{}}
	p.body(s.runs)
	_, _ = w.Write(p.Bytes())
}

// read reads what is new of all runs, or answers with what went wrong.
func (s *Server) read(w http.ResponseWriter) bool {
	for _, r := range s.runs {
		if err := r.Update(); err != nil {
			http.Error(w, diag.From(err).Format(), http.StatusInternalServerError)
			return false
		}
	}
	return true
}

// script takes the place of a reload: what one has scrolled to stays. An answer is parsed as text
// of our own, in which everything that a log may hold is escaped.
const script = `
const live = document.getElementById("live"), state = document.getElementById("state");
async function look() {
  try {
    if (!document.hidden) {
      const answer = await fetch("body"), text = await answer.text();
      if (answer.ok) live.innerHTML = text;
      state.textContent = answer.ok ? "updated " + new Date().toLocaleTimeString() : text;
    }
  } catch (e) {
    state.textContent = "deepwell serve has ended";
  }
  setTimeout(look, 2000);
}
setTimeout(look, 2000);
`
