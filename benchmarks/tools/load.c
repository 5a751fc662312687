/* Sends requests and measures, on one thread.
 *
 *   load -p PORT [options]         prints one line of JSON; times in it are microseconds
 *
 *   -c N   connections (16)          -n N   requests in all, or
 *   -d S   seconds (2)               -r N   requests a second, whether or not answers come (else: one after the other)
 *   -b N   bytes of body (1000)      -m M   model (mock)
 *   -s D   ask for a stream, with the directive D of mock_server, such as "[n=120 i=20 s=200]"
 *   -H H   a header line             -w N   requests before those that count (0)
 *   -t     over TLS                  -o     a new connection for each request       -e  and resume the session
 *
 * Latency runs from the moment a request was due to the last byte of its answer; ttft to the first event; gap
 * between events of one stream; transit from the time that the mock wrote into an event to its arrival here.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 1 << 18 };
enum state { CLOSED, CONNECTING, SHAKING, IDLE, BUSY };

struct samples {
  double *at;
  size_t count, room;
};

struct conn {
  int fd;
  enum state state;
  int status, chunked, counts, offered;
  long left; /* of the body, -1: the head is not here yet */
  int64_t due, began, first, last;
  size_t used, sent;
  SSL *ssl;
  char *in;
};

static int port, streams, tls, once, resume, poller, count_conns = 16, busy;
static long want = -1, warm, started, finished, ok, bad, errors, events, connects, offered, resumed, body_size = 1000;
static double rate, seconds = 2;
static char *request, *directive = "";
static size_t request_size;
static struct samples latency, ttft, gap, transit, handshake;
static struct conn *conns;
static SSL_CTX *context;
static SSL_SESSION *session;
static int64_t begun, until;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void note(struct samples *s, int64_t ns) {
  if (s->count == s->room) s->at = realloc(s->at, (s->room = s->room ? 2 * s->room : 4096) * sizeof *s->at);
  s->at[s->count++] = ns / 1000.0;
}

static int by_size(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return (x > y) - (x < y);
}

static void told(const char *name, struct samples *s) {
  if (!s->count) return;
  qsort(s->at, s->count, sizeof *s->at, by_size);
  printf(", \"%s_p50\": %.1f, \"%s_p99\": %.1f", name, s->at[s->count / 2], name, s->at[(size_t)(s->count * 0.99)]);
}

static int keep_session(SSL *ssl, SSL_SESSION *new) {
  (void)ssl;
  if (session) SSL_SESSION_free(session);
  session = new;
  return 1;
}

static void shut(struct conn *c) {
  if (c->state == BUSY) busy--;
  if (c->ssl) {
    SSL_set_quiet_shutdown(c->ssl, 1);
    SSL_shutdown(c->ssl); /* else its session counts as broken, and may not be resumed */
    SSL_free(c->ssl);
  }
  c->ssl = NULL;
  if (c->fd >= 0) close(c->fd);
  c->fd = -1, c->state = CLOSED, c->used = 0;
}

static void failed(struct conn *c) {
  if (c->state == BUSY && c->counts) errors++, finished++;
  else if (c->state != IDLE) errors++;
  shut(c);
}

static void open_line(struct conn *c) {
  struct sockaddr_in to = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
  int on = 1;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  c->began = now_ns();
  connects++;
  if (connect(c->fd, (void *)&to, sizeof to) && errno != EINPROGRESS) {
    failed(c);
    return;
  }
  c->state = CONNECTING;
  struct epoll_event e = {EPOLLIN | EPOLLOUT | EPOLLET, {.ptr = c}};
  epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
}

static ssize_t write_some(struct conn *c, const char *data, size_t size) {
  if (!c->ssl) return send(c->fd, data, size, MSG_NOSIGNAL);
  int n = SSL_write(c->ssl, data, size);
  return n > 0 ? n : (errno = SSL_get_error(c->ssl, n) == SSL_ERROR_WANT_WRITE ? EAGAIN : EPIPE, -1);
}

static ssize_t read_some(struct conn *c, char *to, size_t room) {
  if (!c->ssl) return recv(c->fd, to, room, 0);
  int n = SSL_read(c->ssl, to, room);
  if (n > 0) return n;
  int why = SSL_get_error(c->ssl, n);
  if (why == SSL_ERROR_WANT_READ) errno = EAGAIN;
  else if (why == SSL_ERROR_ZERO_RETURN) return 0;
  else errno = EPIPE;
  return -1;
}

static void send_rest(struct conn *c) {
  while (c->sent < request_size) {
    ssize_t n = write_some(c, request + c->sent, request_size - c->sent);
    if (n < 0) {
      if (errno != EAGAIN) failed(c);
      return;
    }
    c->sent += n;
  }
}

static void ask(struct conn *c, int64_t due) {
  c->state = BUSY, c->left = -1, c->used = c->sent = 0, c->first = c->last = 0, c->due = due;
  c->counts = started++ >= warm;
  if (started == warm + 1) begun = now_ns(), until = begun + seconds * 1e9;
  busy++;
  send_rest(c);
}

/* Events in a whole piece of a body. */
static void look(struct conn *c, const char *data, size_t size) {
  int64_t now = now_ns();
  const char *at = data, *end = data + size;
  while ((at = memmem(at, end - at, "\"t\":", 4))) {
    at += 4;
    if (!c->counts) continue;
    events++;
    note(&transit, now - atoll(at));
    if (c->last) note(&gap, now - c->last);
    else note(&ttft, now - c->due), c->first = now;
    c->last = now;
  }
}

static void answered(struct conn *c) {
  if (c->counts) {
    note(&latency, now_ns() - c->due);
    finished++;
    if (c->status == 200) ok++;
    else bad++;
  }
  busy--;
  c->state = IDLE;
  if (once) shut(c);
}

/* :return: whether the answer is complete. What is left in `in` is not a whole piece yet. */
static int parse(struct conn *c) {
  size_t at = 0;
  if (c->left < 0) {
    char *end = memmem(c->in, c->used, "\r\n\r\n", 4);
    if (!end) return 0;
    c->status = atoi(c->in + 9);
    *end = 0;
    c->chunked = strcasestr(c->in, "transfer-encoding: chunked") != NULL;
    char *length = strcasestr(c->in, "content-length:");
    c->left = length && !c->chunked ? atol(length + 15) : 0;
    at = end + 4 - c->in;
  }
  if (!c->chunked) {
    size_t have = c->used - at;
    c->left -= have;
    c->used = 0;
    return c->left <= 0;
  }
  for (;;) {
    char *line = memmem(c->in + at, c->used - at, "\r\n", 2);
    if (!line) break;
    size_t size = strtoul(c->in + at, NULL, 16), whole = line + 2 - (c->in + at) + size + 2;
    if (c->used - at < whole) break;
    if (!size) return 1;
    look(c, line + 2, size);
    at += whole;
  }
  memmove(c->in, c->in + at, c->used - at);
  c->used -= at;
  return 0;
}

static void ready(struct conn *c, uint32_t what) {
  if (c->state == CONNECTING && what & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
      failed(c);
      return;
    }
    c->state = IDLE;
    if (tls) {
      c->state = SHAKING;
      c->ssl = SSL_new(context);
      SSL_set_fd(c->ssl, c->fd);
      SSL_set_connect_state(c->ssl);
      /* One whose connection ended badly for OpenSSL's own client is worth nothing, and not offered. */
      c->offered = resume && session && SSL_SESSION_is_resumable(session);
      if (c->offered) SSL_set_session(c->ssl, session);
    }
  }
  if (c->state == SHAKING) {
    int n = SSL_do_handshake(c->ssl);
    if (n != 1) {
      int why = SSL_get_error(c->ssl, n);
      if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) failed(c);
      return;
    }
    if (started >= warm) {
      note(&handshake, now_ns() - c->began);
      offered += c->offered, resumed += SSL_session_reused(c->ssl);
    }
    c->state = IDLE;
    return;
  }
  if (c->state == BUSY && what & EPOLLOUT) send_rest(c);
  while (c->state == BUSY || c->state == IDLE) {
    if (c->used == ROOM) {
      failed(c);
      return;
    }
    ssize_t n = read_some(c, c->in + c->used, ROOM - c->used);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      failed(c);
      return;
    }
    c->used += n;
    if (c->state == BUSY && parse(c)) answered(c);
  }
}

static struct conn *idle_conn(void) {
  static int next;
  for (int i = 0; i < count_conns; i++) {
    struct conn *c = &conns[next = (next + 1) % count_conns];
    if (c->state == IDLE) return c;
    if (c->state == CLOSED) open_line(c);
  }
  return NULL;
}

static int may_ask(int64_t now) {
  if (started < warm) return 1;
  return want >= 0 ? started - warm < want : started == warm || now < until;
}

static void ask_more(void) {
  int64_t now = now_ns();
  while (may_ask(now)) {
    int64_t due = now;
    if (rate && started >= warm && started > warm) {
      due = begun + (int64_t)((started - warm) / rate * 1e9);
      if (due > now) return;
    }
    struct conn *c = idle_conn();
    if (!c) return;
    ask(c, due);
  }
}

int main(int argc, char **argv) {
  char *model = "mock", headers[8192] = "";
  for (int o; (o = getopt(argc, argv, "p:c:n:d:r:b:m:s:H:w:toe")) != -1;) {
    if (o == 'p') port = atoi(optarg);
    if (o == 'c') count_conns = atoi(optarg);
    if (o == 'n') want = atol(optarg);
    if (o == 'd') seconds = atof(optarg);
    if (o == 'r') rate = atof(optarg);
    if (o == 'b') body_size = atol(optarg);
    if (o == 'm') model = optarg;
    if (o == 's') streams = 1, directive = optarg;
    if (o == 'w') warm = atol(optarg);
    if (o == 't') tls = 1;
    if (o == 'o') once = 1;
    if (o == 'e') resume = once = 1;
    if (o == 'H') strncat(strncat(headers, optarg, 2048), "\r\n", 3);
    if (o == '?') return 2;
  }
  if (!port) return fprintf(stderr, "load: -p PORT is missing\n"), 2;
  struct rlimit most;
  getrlimit(RLIMIT_NOFILE, &most);
  most.rlim_cur = most.rlim_max;
  setrlimit(RLIMIT_NOFILE, &most);
  char *fill = malloc(body_size + 1), *body;
  /* Words, as letters without blanks would be taken for an image. */
  const char words[] = "Which of the old rivers ran here before the mill was built? ";
  for (long at = 0; at < body_size; at++) fill[at] = words[at % (sizeof words - 1)];
  char fixed[512];
  int taken = snprintf(fixed, sizeof fixed, "{\"model\":\"%s\",\"stream\":%s,\"messages\":[{\"role\":\"user\",\"content\":\"%s \"}]}", model,
                       streams ? "true" : "false", directive);
  fill[body_size > taken ? body_size - taken : 0] = 0;
  int size = asprintf(&body, "{\"model\":\"%s\",\"stream\":%s,\"messages\":[{\"role\":\"user\",\"content\":\"%s %s\"}]}", model,
                      streams ? "true" : "false", directive, fill);
  request_size = asprintf(&request,
                          "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: load\r\nAccept: */*\r\n"
                          "Content-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s",
                          port, headers, size, body);
  if (tls) {
    context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
    SSL_CTX_sess_set_new_cb(context, keep_session);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  }
  poller = epoll_create1(0);
  conns = calloc(count_conns, sizeof *conns);
  for (int i = 0; i < count_conns; i++) conns[i].in = malloc(ROOM), conns[i].fd = -1;
  begun = now_ns(), until = begun + seconds * 1e9;
  int64_t give_up = begun + (int64_t)((want >= 0 ? 120 : seconds + 20) * 1e9);
  struct epoll_event list[512];
  for (;;) {
    ask_more();
    int64_t now = now_ns();
    if ((!may_ask(now) && !busy) || now > give_up || errors > 10000) break;
    int n = epoll_wait(poller, list, 512, rate ? 0 : 10);
    for (int i = 0; i < n; i++) ready(list[i].data.ptr, list[i].events);
    if (rate && !n) usleep(50);
  }
  double took = (now_ns() - begun) / 1e9;
  printf("{\"ok\": %ld, \"bad\": %ld, \"errors\": %ld, \"unfinished\": %d, \"events\": %ld, \"seconds\": %.4f, \"connects\": %ld, \"offered\": %ld, \"resumed\": %ld",
         ok, bad, errors, busy, events, took, connects, offered, resumed);
  told("latency", &latency), told("ttft", &ttft), told("gap", &gap), told("transit", &transit), told("handshake", &handshake);
  printf("}\n");
  return 0;
}
