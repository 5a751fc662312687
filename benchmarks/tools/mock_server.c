/* A model server that costs nothing: HTTP/1.1 on one thread, for measuring what stands before it.
 *
 *   mock_server PORT
 *
 * A POST is answered with a fixed JSON completion, or, if its body holds "stream":true, with server-sent
 * events. A directive anywhere in the body says how:  [n=120 i=20 s=200]  is 120 events of 200 bytes, one
 * each 20 ms, each in a chunk and a write of its own. i=0 sends as fast as the socket takes.
 * Each event carries the monotonic time at which it was sent, in nanoseconds: "t":123.
 * GET /health says that all is well, any other GET is 404.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 65536, HEAD = 8192, EVENT = 4096 };

struct line {
  int fd, place, used, watched; /* place: in `timed`, -1 for none */
  int events, every_ms, size, sent;
  long due_ms, left; /* left: bytes of the body that are still to come */
  int streaming, wants_stream;
  char *out; /* what the socket did not take */
  size_t out_len, out_room;
  char in[HEAD + 1];
};

static struct line *lines[MOST], *timed[MOST];
static int timed_count, poller;

static const char ANSWER[] =
    "{\"id\":\"c-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,"
    "\"message\":{\"role\":\"assistant\",\"content\":\"Hello there, this is an answer of usual length for a test.\"},"
    "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":16,\"total_tokens\":26}}";
static const char STREAM[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
                             "Transfer-Encoding: chunked\r\n\r\n";

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void untime(struct line *l) {
  if (l->place < 0) return;
  timed[l->place] = timed[--timed_count];
  timed[l->place]->place = l->place;
  l->place = -1;
}

static void drop(struct line *l) {
  untime(l);
  close(l->fd);
  lines[l->fd] = NULL;
  free(l->out);
  free(l);
}

static void watch(struct line *l, int writable) {
  if (l->watched == writable) return;
  l->watched = writable;
  struct epoll_event e = {EPOLLIN | (writable ? EPOLLOUT : 0), {.fd = l->fd}};
  epoll_ctl(poller, EPOLL_CTL_MOD, l->fd, &e);
}

/* 0: the peer has gone, and so has the line */
static int give(struct line *l, const char *data, size_t size) {
  ssize_t sent = 0;
  if (!l->out_len) {
    sent = send(l->fd, data, size, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN) return drop(l), 0;
      sent = 0;
    }
  }
  if ((size_t)sent == size) return 1;
  size -= sent, data += sent;
  if (l->out_len + size > l->out_room) l->out = realloc(l->out, l->out_room = 2 * (l->out_len + size));
  memcpy(l->out + l->out_len, data, size);
  l->out_len += size;
  watch(l, 1);
  return 1;
}

static int send_event(struct line *l) {
  static char event[EVENT + 512];
  int last = ++l->sent >= l->events, pad = l->size > 150 ? l->size - 150 : 1;
  char body[EVENT + 256];
  int n = snprintf(body, sizeof body,
                   "data: {\"id\":\"c-1\",\"object\":\"chat.completion.chunk\",\"model\":\"mock\",\"t\":%lld,\"choices\":[{\"index\":0,"
                   "\"delta\":{\"content\":\"%0*d\"},\"finish_reason\":null}]}\n\n",
                   (long long)now_ns(), pad, 7);
  int m = snprintf(event, sizeof event, "%x\r\n%s\r\n", n, body);
  if (last) m += snprintf(event + m, sizeof event - m, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
  if (last) l->streaming = 0;
  return give(l, event, m);
}

static void flood(struct line *l) {
  while (l->streaming && l->out_len < 65536)
    if (!send_event(l)) return;
}

static int value(const char *in, const char *name, int otherwise) {
  const char *at = strstr(in, name);
  return at ? atoi(at + strlen(name)) : otherwise;
}

static void answer(struct line *l) {
  if (l->wants_stream) {
    l->sent = 0, l->streaming = 1;
    if (!give(l, STREAM, sizeof STREAM - 1)) return;
    if (!l->every_ms) {
      flood(l);
      return;
    }
    if (!send_event(l) || !l->streaming) return;
    l->due_ms = now_ns() / 1000000 + l->every_ms;
    l->place = timed_count;
    timed[timed_count++] = l;
    return;
  }
  char whole[1024];
  int n = snprintf(whole, sizeof whole, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                   sizeof ANSWER - 1, ANSWER);
  give(l, whole, n);
}

static void look_into(struct line *l, const char *body) {
  const char *at;
  if (strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true")) l->wants_stream = 1;
  if ((at = strstr(body, "[n="))) {
    l->events = value(at, "n=", 16);
    l->every_ms = value(at, "i=", 0);
    l->size = value(at, "s=", 200);
    if (l->size > EVENT) l->size = EVENT;
  }
}

static void readable(struct line *l) {
  char spill[65536 + 1];
  for (;;) {
    char *to = l->left ? spill : l->in + l->used;
    ssize_t got = recv(l->fd, to, l->left ? sizeof spill - 1 : (size_t)(HEAD - l->used), 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return drop(l);
    to[got] = 0;
    if (l->left) {
      look_into(l, spill);
      l->left -= got;
    } else {
      l->used += got;
      char *end = strstr(l->in, "\r\n\r\n");
      if (!end) {
        if (l->used == HEAD) return drop(l);
        continue;
      }
      const char *length = strcasestr(l->in, "content-length:");
      l->left = length && length < end ? atol(length + 15) : 0;
      l->left -= l->used - (end + 4 - l->in);
      l->wants_stream = 0, l->events = 16, l->every_ms = 0, l->size = 200;
      look_into(l, end + 4);
      if (!strncmp(l->in, "GET ", 4)) {
        l->used = 0, l->left = 0;
        const char *ok = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"status\":\"ok\"}";
        const char *no = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        const char *said = strncmp(l->in, "GET /health", 11) ? no : ok;
        if (!give(l, said, strlen(said))) return;
        continue;
      }
    }
    if (l->left > 0) continue;
    l->left = 0, l->used = 0;
    int fd = l->fd;
    answer(l);
    if (lines[fd] != l) return;
  }
}

static void writable(struct line *l) {
  ssize_t sent = send(l->fd, l->out, l->out_len, MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno != EAGAIN) drop(l);
    return;
  }
  memmove(l->out, l->out + sent, l->out_len -= sent);
  if (l->out_len) return;
  watch(l, 0);
  if (l->streaming && !l->every_ms) flood(l);
}

static void send_what_is_due(void) {
  long now_ms = now_ns() / 1000000;
  for (int i = timed_count - 1; i >= 0; i--) { /* from the end, since a line that leaves is replaced by the last */
    struct line *l = timed[i];
    if (l->due_ms > now_ms) continue;
    l->due_ms += l->every_ms;
    if (send_event(l) && !l->streaming) untime(l);
  }
}

int main(int argc, char **argv) {
  if (argc != 2) return fprintf(stderr, "usage: mock_server PORT\n"), 2;
  signal(SIGPIPE, SIG_IGN);
  struct rlimit most;
  getrlimit(RLIMIT_NOFILE, &most);
  most.rlim_cur = most.rlim_max < MOST ? most.rlim_max : MOST;
  setrlimit(RLIMIT_NOFILE, &most);
  int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in address = {AF_INET, htons(atoi(argv[1])), {htonl(INADDR_LOOPBACK)}, {0}};
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) return perror("mock_server"), 1;
  poller = epoll_create1(0);
  struct epoll_event e = {EPOLLIN, {.fd = listener}}, ready[256];
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
  for (;;) {
    int n = epoll_wait(poller, ready, 256, 1);
    for (int i = 0; i < n; i++) {
      int fd = ready[i].data.fd;
      if (fd == listener) {
        int accepted;
        while ((accepted = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
          if (accepted >= MOST) {
            close(accepted);
            continue;
          }
          setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          struct line *l = calloc(1, sizeof *l);
          l->fd = accepted, l->place = -1;
          lines[accepted] = l;
          struct epoll_event its = {EPOLLIN, {.fd = accepted}};
          epoll_ctl(poller, EPOLL_CTL_ADD, accepted, &its);
        }
        continue;
      }
      struct line *l = lines[fd];
      if (l && ready[i].events & EPOLLOUT) writable(l);
      if (lines[fd] == l && l && ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(l);
    }
    send_what_is_due();
  }
}
