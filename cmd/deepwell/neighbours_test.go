package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

const pairPlan = `{"version": 1, "model": "config.json", "cluster": "2xcpu", "seq": 8, "batch": 4,
"microbatches": 2, "pp": 2, "types": {"params": "f32", "grads": "f32", "collectives": "f32"}}`

// strangers connect to the addresses over and over until the context ends: they hold connections
// open, trickle, and say garbage, frames of 4 GiB, hellos without TLS, and TLS with a key of their
// own.
func strangers(ctx context.Context, t *testing.T, at []string) (count *atomic.Int64, wait func()) {
	t.Helper()
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(nil, template, template, public, key)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"deepwell-link"},
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	huge := binary.LittleEndian.AppendUint32(append([]byte("DWLK\x03\x00\x01\x00"), make([]byte, 8)...),
		1<<32-1)
	says := []func(c net.Conn){
		func(net.Conn) {},
		func(c net.Conn) { _, _ = c.Write(bytes.Repeat([]byte{0xa5}, 64<<10)) },
		func(c net.Conn) { _, _ = c.Write(huge) },
		func(c net.Conn) { _, _ = c.Write([]byte{22, 3, 1}) },
		func(c net.Conn) {
			if tc := tls.Client(c, config); tc.HandshakeContext(ctx) == nil {
				_, _ = tc.Write(huge)
				_, _ = tc.Read(make([]byte, 64))
			}
		},
	}
	count = &atomic.Int64{}
	var all sync.WaitGroup
	for i := range 2 * len(says) {
		all.Go(func() {
			var held []net.Conn
			defer func() {
				for _, c := range held {
					_ = c.Close()
				}
			}()
			for ctx.Err() == nil {
				c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", at[i%len(at)])
				if err != nil {
					time.Sleep(5 * time.Millisecond) // nobody listens yet, or any more
					continue
				}
				_ = c.SetDeadline(time.Now().Add(time.Second))
				_ = c.(*net.TCPConn).SetLinger(0)
				says[i/2](c)
				count.Add(1)
				if held = append(held, c); len(held) > 60 {
					_ = held[0].Close()
					held = held[1:]
				}
				time.Sleep(time.Millisecond) // two cores train, too
			}
		})
	}
	return count, all.Wait
}

// pairOf runs two processes with a key, and gives what the first printed, and the larger of their
// peaks of memory, in bytes.
func pairOf(t *testing.T, d *desk, at []string, args ...string) (out string, peak int64) {
	t.Helper()
	var both sync.WaitGroup
	var outs [2]bytes.Buffer
	var peaks [2]int64
	for self := range outs {
		cmd := d.command(append(args, "--peers", strings.Join(at, ","), "--key-file", "run.key", "--self",
			fmt.Sprint(self))...)
		cmd.Stdout, cmd.Stderr = &outs[self], &outs[self]
		both.Go(func() {
			if err := cmd.Run(); err != nil {
				t.Errorf("process %d: %v\n%s", self, err, &outs[self])
			}
			if use, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
				peaks[self] = use.Maxrss << 10
			}
		})
	}
	both.Wait()
	return outs[0].String(), max(peaks[0], peaks[1])
}

// A run of two processes trains to the same numbers, in about the same time and memory, while
// strangers hammer the ports of both from before their start to their end.
func TestHostileNeighbours(t *testing.T) {
	for _, c := range []struct {
		name, plan string
		gpu        bool
	}{{"links", pairPlan, false}, {"store", gpuPlan, true}} {
		t.Run(c.name, func(t *testing.T) {
			if slowtest.Raced || c.gpu {
				slowtest.Only(t)
			}
			d := newDesk(t, enginetest.Cache())
			model := strings.NewReplacer(`"num_key_value_heads": 1`, `"num_key_value_heads": 2`,
				`"num_hidden_layers": 1`, `"num_hidden_layers": 2`).Replace(signalModel)
			for name, text := range map[string]string{"plan.json": c.plan, "config.json": model,
				"run.key": strings.Repeat("k", 32)} {
				if err := os.WriteFile(filepath.Join(d.dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if c.gpu {
				d.env = softgpu.Build(t).Env(softgpu.Options{GPUs: 2, Memory: 64 << 20,
					Env: append([]string{"SOFTGPU_NCCL_DIR=" + t.TempDir()}, d.env[len(d.env)-2:]...)})
			}
			args := []string{"train", "run.toml", "--set", "steps=9", "--set", "precision=f32", "--set",
				"batch=4", "--plan", "plan.json", "--set"}
			began := time.Now()
			quiet, peak := pairOf(t, d, enginetest.Addresses(t, 2), append(args, "out=quiet")...)
			alone := time.Since(began)
			at := enginetest.Addresses(t, 2)
			ctx, stop := context.WithCancel(t.Context())
			count, wait := strangers(ctx, t, at)
			defer wait()
			defer stop()
			began = time.Now()
			loud, more := pairOf(t, d, at, append(args, "out=loud")...)
			took := time.Since(began)
			t.Logf("alone %s and %d MiB; beside %d connections %s and %d MiB", alone.Round(time.Millisecond),
				peak>>20, count.Load(), took.Round(time.Millisecond), more>>20)
			if len(steps(quiet)) != 9 || fmt.Sprint(steps(quiet)) != fmt.Sprint(steps(loud)) {
				t.Errorf("alone:\n%s\nbeside strangers:\n%s", quiet, loud)
			}
			const last = "/checkpoints/step-00000009"
			if code, out := d.run("ckpt", "diff", "quiet"+last, "loud"+last); code != 0 {
				t.Errorf("the checkpoints differ:\n%s", out)
			}
			if count.Load() < 100 || more > peak+128<<20 || took > 3*alone+30*time.Second {
				t.Error("too few connections, or too much memory or time")
			}
		})
	}
}
